"""Mixture of experts in portable Triton: rows sorted by expert, two grouped products, a sum in a fixed order.

Shapes: x [T, H], w1 [E, 2I, H] (or [E, I, H]), w2 [E, H, I], any strides; weights and ids [T, K] -> out [T, H]. fp16, bf16 and
fp32, sums in fp32. Here are the two products: the first gathers rows of x in its loads and activates in its epilogue.

Tiles of tokens are as tall as an expert has rows on average, from 16, so that few tokens pay for few rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu, why_no_triton
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.launch import INTERPRETING, Build, Grid, Pointer, cdiv, stand_in
from flashmoe_science.ops.moe.activation import activated
from flashmoe_science.ops.moe.call import Bind, MoEInputs, our_kernel, run_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.grouped import (
    Product,
    down_constexprs,
    grouped,
    launches_around,
    starts_early,
    up_constexprs,
    why_not_grouped,
    workspace,
)
from flashmoe_science.ops.moe.rows import RowCounts, Tile, tables_of
from flashmoe_science.problem import DTYPE_BYTES

NAME = "moe_grouped_triton"
GROUP = 8  # tiles of rows whose products with one tile of weights run at about the same time, and share it in L2


@triton.jit
def _tile_of(tables, pairs, tiles, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(whether this program has a tile, the ``Tile``), whose column is the first of ``BLOCK_N`` elements."""
    parts = tables_of(tables, pairs, EXPERTS, tiles)
    columns: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    index = tl.program_id(0)
    group = index // (GROUP * columns)
    height = tl.minimum(tiles - group * GROUP, GROUP)
    inside = index % (GROUP * columns)
    tile = group * GROUP + inside % height
    exists = tile < tl.load(parts.tile_count)
    expert = tl.load(parts.tile_expert + tile, mask=exists, other=0)
    row = tl.load(parts.tile_row + tile, mask=exists, other=0)
    end = tl.load(parts.offsets + expert + 1, mask=exists, other=0)
    return exists, Tile(expert.to(tl.int64), row, end, inside // height * BLOCK_N)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    if INTERPRET:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _multiply(
    a, w, tile, rows, of_a, of_w, EVEN: tl.constexpr, WIDTH: tl.constexpr, SECOND: tl.constexpr,
    DEPTH: tl.constexpr, STRIDE_A: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The sums of rows ``of_a`` of a times rows ``of_w``, of ``WIDTH``, of the expert's weights; and times those ``SECOND``
    rows further, if it is not None. ``EVEN``: tiles divide the weights."""
    depth = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    a_ptrs = a + of_a.to(tl.int64)[:, None] * STRIDE_A + depth[None, :]  # [BLOCK_M, BLOCK_K]
    w_ptrs = w + tile.expert * STRIDE_E + of_w.to(tl.int64)[None, :] * STRIDE_N + depth.to(tl.int64)[:, None] * STRIDE_K
    first = tl.zeros([rows.shape[0], of_w.shape[0]], tl.float32)
    second = tl.zeros([rows.shape[0], of_w.shape[0]], tl.float32)
    for k in tl.range(0, DEPTH, BLOCK_K, num_stages=NUM_STAGES):
        x = tl.load(a_ptrs, mask=(rows < tile.end)[:, None] & (k + depth < DEPTH)[None, :], other=0.0)
        # All of a tile is inside where tiles divide the weights: a mask would cost instructions.
        inside = None if EVEN else (k + depth < DEPTH)[:, None] & (of_w < WIDTH)[None, :]
        other: tl.constexpr = None if EVEN else 0.0
        first = _dot(x, tl.load(w_ptrs, mask=inside, other=other), first, PRECISION, INTERPRET)
        if SECOND is not None:
            second = _dot(x, tl.load(w_ptrs + SECOND * STRIDE_N, mask=inside, other=other), second, PRECISION, INTERPRET)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * STRIDE_K
    return first, second


@triton.jit
def _store(block, out, rows, columns, tile, WIDTH: tl.constexpr):
    out_ptrs = out + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(out_ptrs, block.to(out.dtype.element_ty), mask=(rows < tile.end)[:, None] & (columns < WIDTH)[None, :])


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_up(
    x, w, bias, out, tables, pairs, tiles,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE_X: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """The activated first product of one tile: out[row, n] = act(x[token of row] . w[expert, gate n], . w[expert, up n])."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    exists, tile = _tile_of(tables, pairs, tiles, EXPERTS, WIDTH, BLOCK_N, GROUP)
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
        gate, up = _multiply(
            x, w, tile, rows, token, of_w, even, ROWS, UP,
            DEPTH, STRIDE_X, STRIDE_E, STRIDE_N, STRIDE_K, BLOCK_K, NUM_STAGES, PRECISION, INTERPRET,
        )  # fmt: skip
        if bias is not None:
            biases: tl.constexpr = 2 * WIDTH if GATED else WIDTH
            bias_ptrs = bias + tile.expert * biases + of_w  # as of_w
            gate += tl.load(bias_ptrs, mask=of_w < ROWS, other=0.0).to(tl.float32)[None, :]
            if GATED and not INTERLEAVED:
                up += tl.load(bias_ptrs + WIDTH, mask=of_w < ROWS, other=0.0).to(tl.float32)[None, :]
        if both:
            gate, up = tl.split(tl.reshape(gate, [BLOCK_M, BLOCK_N, 2]))
        _store(activated(gate, up, FUNCTION, GATED, ALPHA, LIMIT), out, rows, columns, tile, WIDTH)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_down(
    a, w, bias, out, tables, pairs, tiles,
    EXPERTS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """The second product of one tile: out[row, n] = a[row] . w[expert, n]."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    exists, tile = _tile_of(tables, pairs, tiles, EXPERTS, WIDTH, BLOCK_N, GROUP)
    if exists:
        rows = tile.row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        columns = tile.column + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        even: tl.constexpr = DEPTH % BLOCK_K == 0 and WIDTH % BLOCK_N == 0
        acc, _ = _multiply(
            a, w, tile, rows, rows, columns, even, WIDTH, None,
            DEPTH, DEPTH, STRIDE_E, STRIDE_N, STRIDE_K, BLOCK_K, NUM_STAGES, PRECISION, INTERPRET,
        )  # fmt: skip
        if bias is not None:
            acc += tl.load(bias + tile.expert * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
        _store(acc, out, rows, columns, tile, WIDTH)


def supports(problem: MoEProblem, device: Device) -> str | None:
    if reason := why_no_triton(device):
        return reason
    return why_not_grouped(problem)


_Tile = tuple[int, int, int, int, int]  # block_m, block_n, block_k, num_warps, num_stages
_TILES_OF_FP32: list[_Tile] = [(16, 64, 32, 4, 2), (32, 64, 32, 4, 2)]
_NAMES = ("block_m", "block_n", "block_k", "num_warps", "num_stages")


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    """Tiles by rows an expert that fit the GPU's shared memory, the best guess first. ``block_n`` counts rows of weights, of
    which half are gates in the first product."""
    assert device is not None
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


def _grid(counts: RowCounts, width: int, block_n: int) -> Grid:
    return (counts.tiles * cdiv(width, block_n), 1, 1)


def _columns(problem: MoEProblem, config: Config) -> int:
    """Columns of the first product's result in one tile."""
    return config["block_n"] // (2 if problem.gated else 1)


def _product(
    function: Any, a: Pointer, w: torch.Tensor, bias: torch.Tensor | None, constexprs: dict[str, Any], config: Config
) -> Product:
    """One of the two products, built for operands like these; ``a``: a pointer to x, or to what the first product wrote."""
    width, block_n, values = constexprs["WIDTH"], constexprs["BLOCK_N"], tuple(constexprs.values())
    arguments = (a, stand_in(w), stand_in(bias), Pointer(w.dtype), Pointer(torch.int32), 2, 2, *values)
    options = {"num_warps": config["num_warps"], "num_stages": config["num_stages"]}
    build = Build(function, arguments, **options, launch_pdl=constexprs["EARLY_START"])
    return lambda counts: build.bound(_grid(counts, width, block_n), counts.pairs, counts.tiles, *values)


def plan(inputs: MoEInputs, config: Config) -> Bind:
    p, (x, w1, w2, _, _, gate_up_bias, down_bias) = inputs.problem, inputs.tensors
    rest = {
        "BLOCK_K": config["block_k"], "GROUP": GROUP, "NUM_STAGES": config["num_stages"],
        "PRECISION": "bf16x6" if p.dtype == "fp32" else "tf32", "INTERPRET": INTERPRETING, "EARLY_START": starts_early(inputs),
    }  # fmt: skip
    of_up = {**up_constexprs(inputs), "BLOCK_M": config["block_m"], "BLOCK_N": _columns(p, config), **rest}
    of_down = {**down_constexprs(inputs), "BLOCK_M": config["block_m"], "BLOCK_N": config["block_n"], **rest}
    up = _product(flashmoe_moe_up, Pointer(x.dtype, x.data_ptr()), w1, gate_up_bias, of_up, config)
    down = _product(flashmoe_moe_down, Pointer(x.dtype), w2, down_bias, of_down, config)
    return grouped(inputs, config, up, down)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    counts, threads = RowCounts.of(problem, config["block_m"]), 32 * config["num_warps"]
    up = Launch(f"^{flashmoe_moe_up.__name__}$", _grid(counts, problem.hidden, _columns(problem, config)), threads)
    down = Launch(f"^{flashmoe_moe_down.__name__}$", _grid(counts, problem.dim, config["block_n"]), threads)
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
