"""Mixture of experts in portable Triton: rows sorted by expert, two grouped products, a sum in a fixed order.

Shapes: x [T, H], w1 [E, 2I, H] (or [E, I, H]), w2 [E, H, I], any strides; weights and ids [T, K] -> out [T, H]. fp16, bf16 and
fp32, sums in fp32. Here are the two products: the first gathers rows of x in its loads and activates in its epilogue.

Tiles of tokens are as tall as an expert has rows on average, from 16, so that few tokens pay for few rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu, why_no_triton
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.launch import INTERPRETING, Pointer, stand_in
from flashmoe_science.ops.moe.activation import activated
from flashmoe_science.ops.moe.call import Bind, MoEInputs, our_kernel, run_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.down import flashmoe_moe_down
from flashmoe_science.ops.moe.products.formats import (
    configs_in_format,
    in_bytes,
    multiply_weights,
    scales_in_format,
    why_not_in_format,
)
from flashmoe_science.ops.moe.products.grouped import (
    down_constexprs,
    grouped,
    launches_around,
    starts_early,
    up_constexprs,
    why_not_grouped,
    workspace,
)
from flashmoe_science.ops.moe.products.tiles import GROUP, build_product, grid_of, store_rows, tile_of
from flashmoe_science.ops.moe.rows import RowCounts
from flashmoe_science.problem import DTYPE_BYTES

NAME = "moe_grouped_triton"


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_up(
    x, w, scale, zero_point, input_scale, bias, out, z, tables, pairs, tiles,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE_X: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, EARLY_START: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """The activated first product of one tile: out[row, n] = act(x[token of row] . w[expert, gate n], . w[expert, up n]).
    ``z``, unless it is None: [rows, rows of w], what is activated."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    exists, tile = tile_of(tables, pairs, tiles, EXPERTS, WIDTH, BLOCK_N, GROUP)
    if exists:
        rows = tile.row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        token = tl.load(tables + rows, mask=rows < tile.end, other=0) // TOP_K  # [BLOCK_M]
        columns = tile.column + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        # A gate and its up that alternate are one product, split at the end; else the up is WIDTH rows of weights further.
        both: tl.constexpr = GATED and INTERLEAVED
        if both:
            of_w = 2 * tile.column + tl.arange(0, 2 * BLOCK_N)  # [2 BLOCK_N]
        else:
            of_w = columns
        ROWS: tl.constexpr = 2 * WIDTH if both else WIDTH
        UP: tl.constexpr = WIDTH if GATED and not INTERLEAVED else None
        even: tl.constexpr = DEPTH % BLOCK_K == 0 and WIDTH % BLOCK_N == 0
        gate, up = multiply_weights(
            x, w, scale, zero_point, input_scale, tile, rows, token, of_w, even, ROWS, UP,
            DEPTH, STRIDE_X, STRIDE_E, STRIDE_N, STRIDE_K, SCALES, BLOCK_K, NUM_STAGES, PRECISION, INTERPRET,
        )  # fmt: skip
        if bias is not None:
            biases: tl.constexpr = 2 * WIDTH if GATED else WIDTH
            bias_ptrs = bias + tile.expert * biases + of_w  # as of_w
            gate += tl.load(bias_ptrs, mask=of_w < ROWS, other=0.0).to(tl.float32)[None, :]
            if GATED and not INTERLEAVED:
                up += tl.load(bias_ptrs + WIDTH, mask=of_w < ROWS, other=0.0).to(tl.float32)[None, :]
        if z is not None:
            store_rows(gate, z, rows, of_w, tile, ROWS, 2 * WIDTH if GATED else WIDTH)
            if GATED and not INTERLEAVED:
                store_rows(up, z + WIDTH, rows, of_w, tile, ROWS, 2 * WIDTH)
        if both:
            gate, up = tl.split(tl.reshape(gate, [BLOCK_M, BLOCK_N, 2]))
        store_rows(activated(gate, up, FUNCTION, GATED, ALPHA, LIMIT), out, rows, columns, tile, WIDTH, WIDTH)


def supports(problem: MoEProblem, device: Device) -> str | None:
    if reason := why_no_triton(device):
        return reason
    assert device is not None
    return why_not_in_format(problem, device) or why_not_grouped(problem)


_Tile = tuple[int, int, int, int, int]  # block_m, block_n, block_k, num_warps, num_stages
_TILES_OF_FP32: list[_Tile] = [(16, 64, 32, 4, 2), (32, 64, 32, 4, 2)]
_NAMES = ("block_m", "block_n", "block_k", "num_warps", "num_stages")


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    """Tiles by rows an expert that fit the GPU's shared memory, the best guess first. ``block_n`` counts rows of weights, of
    which half are gates in the first product."""
    assert device is not None
    if problem.weight_format is not None:
        return configs_in_format(problem, device)
    size, rows, wgmma = DTYPE_BYTES[problem.dtype], problem.rows_per_expert(), device.compute_capability[0] == 9
    tiles = _TILES_OF_FP32 if problem.dtype == "fp32" else _tiles(rows, wgmma)
    fitting = [(m, n, k, w, s) for m, n, k, w, s in tiles if s * (m + n) * k * size <= device.shared_per_block]
    return tuple(Config(**dict(zip(_NAMES, tile, strict=True))) for tile in fitting)


def _tiles(rows: float, wgmma: bool) -> list[_Tile]:
    """``rows`` an expert, on average; ``wgmma``: on Hopper (docs/notes/moe-tiles.md)."""
    if rows <= 8:
        # The first spills a register on Ada.
        deep = [(16, 64, 128, 4, 4), (16, 128, 128, 4, 3), (16, 64, 256, 4, 3)] if wgmma else [(16, 128, 64, 4, 4)]
        return [*deep, (16, 64, 64, 4, 3)]
    if rows <= 24:
        return [(32, 128, 128, 4, 3), (32, 256, 128, 8, 2), (16, 128, 128, 4, 3), (32, 128, 64, 4, 4), (32, 64, 64, 4, 3)]
    if rows <= 48:
        return [(64, 128, 64, 4, 4), (64, 256, 64, 4, 4), (32, 128, 128, 4, 3), (128, 256, 64, 8, 3), (64, 64, 64, 4, 3)]
    widest = [(128, 256, 64, 8, 3), (64, 256, 64, 4, 4), (64, 128, 64, 4, 4)] if wgmma else []  # it spills where mma.sync is
    return [*widest, (128, 128, 64, 8, 3), (64, 128, 64, 4, 3)]


def _columns(problem: MoEProblem, config: Config) -> int:
    """Columns of the first product's result in one tile."""
    return config["block_n"] // (2 if problem.gated else 1)


def plan(inputs: MoEInputs, config: Config) -> Bind:
    inputs = in_bytes(inputs)
    p, (x, w1, w2, _, _, gate_up_bias, down_bias, *of_weights) = inputs.problem, inputs.tensors
    rest = {
        "BLOCK_K": config["block_k"], "GROUP": GROUP, "NUM_STAGES": config["num_stages"],
        "PRECISION": "bf16x6" if p.dtype == "fp32" else "tf32", "INTERPRET": INTERPRETING, "EARLY_START": starts_early(x),
    }  # fmt: skip
    of_scales = (None, None) if p.weight_format is None else scales_in_format(inputs)
    of_up = {**up_constexprs(inputs), "BLOCK_M": config["block_m"], "BLOCK_N": _columns(p, config), **rest}
    of_down = {**down_constexprs(inputs), "BLOCK_M": config["block_m"], "BLOCK_N": config["block_n"], **rest}
    of_up["SCALES"], of_down["SCALES"] = (
        one and one._replace(name=one.name.removesuffix("_static")) for one in of_scales
    )  # tokens are quantised where there are input scales
    new, schedule = Pointer(x.dtype), (config["num_warps"], config["num_stages"])
    z = new if inputs.saves_z else None
    up_pointers = *map(stand_in, (x, w1, *of_weights[::2], gate_up_bias)), new, z
    up = build_product(flashmoe_moe_up, up_pointers, of_up, *schedule)
    down_pointers = new, *map(stand_in, (w2, *of_weights[1::2], down_bias)), new
    down = build_product(flashmoe_moe_down, down_pointers, of_down, *schedule)
    return grouped(inputs, config, up, down)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    counts, threads = RowCounts.of(problem, config["block_m"]), 32 * config["num_warps"]
    up = Launch(f"^{flashmoe_moe_up.__name__}$", grid_of(counts, problem.hidden, _columns(problem, config)), threads)
    down = Launch(f"^{flashmoe_moe_down.__name__}$", grid_of(counts, problem.dim, config["block_n"]), threads)
    return launches_around(problem, config, up, down)


KERNEL = our_kernel(
    name=NAME,
    about="portable Triton: rows sorted by expert, two grouped products, a sum in a fixed order",
    supports=supports,
    configs=configs,
    run=run_of(plan),
    launches=launches,
    plan=plan,
    workspace=workspace,
    interpretable=True,
)
