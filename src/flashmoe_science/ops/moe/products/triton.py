"""Mixture of experts in portable Triton: rows sorted by expert, two grouped products, a sum in a fixed order.

Shapes: x [T, H], w1 [E, 2I, H] (or [E, I, H]), w2 [E, H, I], any strides; weights and ids [T, K] -> out [T, H]. fp16, bf16 and
fp32, sums in fp32. The launches of one call: the rows (``rows_triton.py``: one or two), the first product with its gather in
the loads and the activation in the epilogue, the second product, and the combination, which applies the routing weights.

Tiles of tokens are as tall as an expert has rows on average, from 16, so that few tokens pay for few rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu, why_no_triton
from flashmoe_science.kernel import CannotServe, CompileJob, Config, Device, Launch
from flashmoe_science.ops.launch import (
    INTERPRETING,
    Build,
    Grid,
    Part,
    Pointer,
    address,
    allocator,
    argument,
    between,
    bytes_between,
    can_start_early,
    cdiv,
    next_power_of_2,
    stand_in,
)
from flashmoe_science.ops.moe.activation_triton import activated
from flashmoe_science.ops.moe.call.inputs import (
    SWIGLU,
    Activation,
    BoundMoE,
    MoEInputs,
    MoEKernel,
    MoELauncher,
    Shape,
    of_result,
)
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.route.triton import launches_of, routing_bytes, why_no_router
from flashmoe_science.ops.moe.rows_triton import Sizes, bind_tables, flashmoe_moe_rows, tables_of, why_no_tables
from flashmoe_science.problem import DTYPE_BYTES

NAME = "moe_grouped_triton"
GROUP = 8  # tiles of rows whose products with one tile of weights run at about the same time, and share it in L2
COMBINED = 1024  # columns of a program of the combination


@triton.jit
def _tile_of(tables, pairs, tiles, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(whether there is one, expert, first row, the expert's last row + 1, first column) of this program's tile."""
    _, _, offsets, tile_expert, tile_row, tile_count, _, _ = tables_of(tables, pairs, EXPERTS, tiles)
    columns: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    index = tl.program_id(0)
    group = index // (GROUP * columns)
    height = tl.minimum(tiles - group * GROUP, GROUP)
    inside = index % (GROUP * columns)
    tile = group * GROUP + inside % height
    exists = tile < tl.load(tile_count)
    expert = tl.load(tile_expert + tile, mask=exists, other=0)
    row = tl.load(tile_row + tile, mask=exists, other=0)
    end = tl.load(offsets + expert + 1, mask=exists, other=0)
    return exists, expert.to(tl.int64), row, end, inside // height * BLOCK_N


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    if INTERPRET:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


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
    exists, expert, row, end, column = _tile_of(tables, pairs, tiles, EXPERTS, WIDTH, BLOCK_N, GROUP)
    if exists:
        rows = row + tl.arange(0, BLOCK_M)
        token = tl.load(tables + rows, mask=rows < end, other=0) // TOP_K
        columns = column + tl.arange(0, BLOCK_N)
        # A gate and its up side by side are one product, parted at the end; else the up is WIDTH rows of weights further.
        both: tl.constexpr = GATED and INTERLEAVED
        if both:
            of_w = 2 * column + tl.arange(0, 2 * BLOCK_N)
        else:
            of_w = columns
        ROWS: tl.constexpr = 2 * WIDTH if both else WIDTH
        depth = tl.arange(0, BLOCK_K)
        a = x + token.to(tl.int64)[:, None] * STRIDE_X + depth[None, :]
        b = w + expert * STRIDE_E + of_w.to(tl.int64)[None, :] * STRIDE_N + depth.to(tl.int64)[:, None] * STRIDE_K
        gate = tl.zeros([BLOCK_M, of_w.shape[0]], tl.float32)
        up = tl.zeros([BLOCK_M, of_w.shape[0]], tl.float32)
        even: tl.constexpr = DEPTH % BLOCK_K == 0 and WIDTH % BLOCK_N == 0
        for k in tl.range(0, DEPTH, BLOCK_K, num_stages=NUM_STAGES):
            here = tl.load(a, mask=(rows < end)[:, None] & (k + depth < DEPTH)[None, :], other=0.0)
            if even:
                one = tl.load(b)
            else:
                inside = (k + depth < DEPTH)[:, None] & (of_w < ROWS)[None, :]
                one = tl.load(b, mask=inside, other=0.0)
            gate = _dot(here, one, gate, PRECISION, INTERPRET)
            if GATED and not INTERLEAVED:
                if even:
                    other = tl.load(b + WIDTH * STRIDE_N)
                else:
                    other = tl.load(b + WIDTH * STRIDE_N, mask=inside, other=0.0)
                up = _dot(here, other, up, PRECISION, INTERPRET)
            a += BLOCK_K
            b += BLOCK_K * STRIDE_K
        if bias is not None:
            biases: tl.constexpr = 2 * WIDTH if GATED else WIDTH
            start = bias + expert * biases + of_w
            gate += tl.load(start, mask=of_w < ROWS, other=0.0).to(tl.float32)[None, :]
            if GATED and not INTERLEAVED:
                up += tl.load(start + WIDTH, mask=of_w < ROWS, other=0.0).to(tl.float32)[None, :]
        if both:
            gate, up = tl.split(tl.reshape(gate, [BLOCK_M, BLOCK_N, 2]))
        active = activated(gate, up, FUNCTION, GATED, ALPHA, LIMIT)
        written = out + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        tl.store(written, active.to(out.dtype.element_ty), mask=(rows < end)[:, None] & (columns < WIDTH)[None, :])


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_down(
    a_base, w, bias, out, tables, pairs, tiles,
    EXPERTS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """The second product of one tile: out[row, n] = a[row] . w[expert, n]."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    exists, expert, row, end, column = _tile_of(tables, pairs, tiles, EXPERTS, WIDTH, BLOCK_N, GROUP)
    if exists:
        rows = row + tl.arange(0, BLOCK_M)
        columns = column + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        a = a_base + rows.to(tl.int64)[:, None] * DEPTH + depth[None, :]
        b = w + expert * STRIDE_E + columns.to(tl.int64)[None, :] * STRIDE_N + depth.to(tl.int64)[:, None] * STRIDE_K
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        even: tl.constexpr = DEPTH % BLOCK_K == 0 and WIDTH % BLOCK_N == 0
        for k in tl.range(0, DEPTH, BLOCK_K, num_stages=NUM_STAGES):
            here = tl.load(a, mask=(rows < end)[:, None] & (k + depth < DEPTH)[None, :], other=0.0)
            if even:
                one = tl.load(b)
            else:
                one = tl.load(b, mask=(k + depth < DEPTH)[:, None] & (columns < WIDTH)[None, :], other=0.0)
            acc = _dot(here, one, acc, PRECISION, INTERPRET)
            a += BLOCK_K
            b += BLOCK_K * STRIDE_K
        if bias is not None:
            acc += tl.load(bias + expert * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
        written = out + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        tl.store(written, acc.to(out.dtype.element_ty), mask=(rows < end)[:, None] & (columns < WIDTH)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def flashmoe_moe_combine(
    rows, weights, out, tables, pairs,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """out[token] = the sum over its places, in their order, of weight times row; a place without a row adds nothing."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        row = tl.load(tables + pairs + token * TOP_K + place).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + place).to(tl.float32)
        value = tl.load(rows + row * WIDTH + columns, mask=(row >= 0) & (columns < WIDTH), other=0.0).to(tl.float32)
        acc += tl.where(row >= 0, weight * value, 0.0)
    tl.store(out + token * WIDTH + columns, acc.to(out.dtype.element_ty), mask=columns < WIDTH)


def supports(problem: MoEProblem, device: Device) -> str | None:
    if reason := why_no_triton(device):
        return reason
    return why_no_tables(problem) or why_no_router(problem)


_Tile = tuple[int, int, int, int, int]  # block_m, block_n, block_k, num_warps, num_stages
_TILES_OF_FP32: list[_Tile] = [(16, 64, 32, 4, 2), (32, 64, 32, 4, 2)]
_NAMES = ("block_m", "block_n", "block_k", "num_warps", "num_stages")


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    """Tiles by rows an expert that fit the GPU's shared memory, the best guess first. ``block_n`` counts rows of weights, of
    which half are gates in the first product."""
    assert device is not None
    size, rows, wgmma = DTYPE_BYTES[problem.dtype], problem.height(), device.compute_capability[0] == 9
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


@dataclass(frozen=True, slots=True)
class _Shape:
    """What of a call its kernels are specialised on, beside the config."""

    experts: int
    top_k: int
    dim: int
    hidden: int
    stride_x: int
    strides_1: tuple[int, ...]
    strides_2: tuple[int, ...]
    activation: Activation
    dtype: str

    @classmethod
    def of(cls, inputs: MoEInputs) -> _Shape:
        p = inputs.problem
        return cls(
            p.experts, p.top_k, p.dim, p.hidden, inputs.x.stride(0), inputs.w1.stride(), inputs.w2.stride(), inputs.activation,
            p.dtype,
        )  # fmt: skip

    def up(self, config: Config, early_start: bool) -> dict[str, Any]:
        a, gated = self.activation, self.activation.gated
        return {
            "EXPERTS": self.experts, "TOP_K": self.top_k, "DEPTH": self.dim, "WIDTH": self.hidden,
            "STRIDE_X": self.stride_x, "STRIDE_E": self.strides_1[0], "STRIDE_N": self.strides_1[1],
            "STRIDE_K": self.strides_1[2],
            "FUNCTION": a.function, "GATED": gated, "INTERLEAVED": a.interleaved, "ALPHA": a.alpha, "LIMIT": a.limit,
            "BLOCK_M": config["block_m"], "BLOCK_N": config["block_n"] // (2 if gated else 1), "BLOCK_K": config["block_k"],
            "GROUP": GROUP, "NUM_STAGES": config["num_stages"], **self._rest(early_start),
        }  # fmt: skip

    def down(self, config: Config, early_start: bool) -> dict[str, Any]:
        return {
            "EXPERTS": self.experts, "DEPTH": self.hidden, "WIDTH": self.dim, "STRIDE_E": self.strides_2[0],
            "STRIDE_N": self.strides_2[1], "STRIDE_K": self.strides_2[2],
            "BLOCK_M": config["block_m"], "BLOCK_N": config["block_n"], "BLOCK_K": config["block_k"],
            "GROUP": GROUP, "NUM_STAGES": config["num_stages"], **self._rest(early_start),
        }  # fmt: skip

    def _rest(self, early_start: bool) -> dict[str, Any]:
        precision = "bf16x6" if self.dtype == "fp32" else "tf32"
        return {"PRECISION": precision, "INTERPRET": INTERPRETING, "EARLY_START": early_start}


def _grids(problem: MoEProblem, config: Config, gated: bool) -> tuple[Grid, Grid]:
    """Of the first product and the second."""
    tiles = Sizes(problem.pairs(), problem.experts, config["block_m"]).tiles
    up = tiles * cdiv(problem.hidden, config["block_n"] // (2 if gated else 1))
    return (up, 1, 1), (tiles * cdiv(problem.dim, config["block_n"]), 1, 1)


def _grid_of_combination(problem: MoEProblem) -> Grid:
    return problem.tokens, cdiv(problem.dim, _combined(problem.dim)), 1


def _combined(dim: int) -> int:
    return min(COMBINED, max(16, next_power_of_2(dim)))


# (x, w1, w2, gate_up_bias, down_bias, tables, active, down): writes ``active`` [pairs, hidden], then ``down`` [pairs, dim]. The
# last three are arguments of launches.
Products = Callable[..., None]


class GroupedLauncher(MoELauncher):
    """What is around any two grouped products: memory, the rows before them and the combination after. Holds no tensor."""

    def __init__(self, inputs: MoEInputs, config: Config) -> None:
        if inputs.x.stride(1) != 1:
            raise CannotServe(f"hidden_states has stride {inputs.x.stride(1)} in its last dimension; it must be 1")
        p = inputs.problem
        self._config = config
        self._early = not INTERPRETING and can_start_early(inputs.x.device)
        new, weights = Pointer(inputs.x.dtype), stand_in(inputs.topk_weights)
        self._combine = (p.top_k, p.dim, _combined(p.dim), self._early)
        combine = (new, weights, new, Pointer(torch.int32), 2, *self._combine)
        self._build_combine = Build(flashmoe_moe_combine, combine, num_warps=4, launch_pdl=self._early)

    @abstractmethod
    def _products(self, problem: MoEProblem, sizes: Sizes) -> Products:
        """The two products of a problem's rows."""

    def bind(self, like: MoEInputs, shape: Shape | None = None) -> BoundMoE:
        p, dtype, on_gpu = like.problem, like.x.dtype, like.x.is_cuda
        sizes = Sizes(p.pairs(), p.experts, self._config["block_m"])
        take, allocate, of_out = between(on_gpu, _parts(p, sizes)), allocator(on_gpu), of_result(like, shape)
        write, multiply = bind_tables(like.topk_ids, sizes, self._early), self._products(p, sizes)
        combine = self._build_combine.bound(_grid_of_combination(p), sizes.pairs, *self._combine)

        def call(
            x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None,
        ) -> torch.Tensor:  # fmt: skip
            held, tables, active, down = take()  # held to the end of this call
            write(ids, tables)
            multiply(x, w1, w2, gate_up_bias, down_bias, tables, active, down)
            out = allocate(*of_out, dtype)
            combine(down, address(weights), address(out), tables)
            return out

        return call


class _Launcher(GroupedLauncher):
    """Computes inputs like those that it was planned for, of any number of tokens."""

    def __init__(self, inputs: MoEInputs, config: Config) -> None:
        super().__init__(inputs, config)
        shape, early, self._gated = _Shape.of(inputs), self._early, inputs.activation.gated
        self._up, self._down = tuple(shape.up(config, early).values()), tuple(shape.down(config, early).values())
        new, tables = Pointer(inputs.x.dtype), Pointer(torch.int32)
        up = (*map(stand_in, (inputs.x, inputs.w1, inputs.gate_up_bias)), new, tables, 2, 2, *self._up)
        down = (new, *map(stand_in, (inputs.w2, inputs.down_bias)), new, tables, 2, 2, *self._down)
        options = {"num_warps": config["num_warps"], "num_stages": config["num_stages"], "launch_pdl": early}
        self._build_up, self._build_down = Build(flashmoe_moe_up, up, **options), Build(flashmoe_moe_down, down, **options)

    def _products(self, problem: MoEProblem, sizes: Sizes) -> Products:
        grid_up, grid_down = _grids(problem, self._config, self._gated)
        launch_up = self._build_up.bound(grid_up, sizes.pairs, sizes.tiles, *self._up)
        launch_down = self._build_down.bound(grid_down, sizes.pairs, sizes.tiles, *self._down)

        def multiply(
            x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, gate_up_bias: torch.Tensor | None,
            down_bias: torch.Tensor | None, tables: Any, active: Any, down: Any,
        ) -> None:  # fmt: skip
            launch_up(address(x), address(w1), argument(gate_up_bias), active, tables)
            launch_down(active, address(w2), argument(down_bias), down, tables)

        return multiply


def plan(inputs: MoEInputs, config: Config) -> _Launcher:
    return _Launcher(inputs, config)


def run(inputs: MoEInputs, config: Config) -> torch.Tensor:
    return plan(inputs, config)(inputs)


def workspace(problem: MoEProblem, config: Config) -> int:
    """The rows between the products and those after the second, the tables, and what a router before them chose."""
    sizes = Sizes(problem.pairs(), problem.experts, config["block_m"])
    return bytes_between(_parts(problem, sizes)) + routing_bytes(problem)


def _parts(problem: MoEProblem, sizes: Sizes) -> tuple[Part, ...]:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[problem.dtype]
    return (sizes.length, torch.int32), (sizes.pairs * problem.hidden, dtype), (sizes.pairs * problem.dim, dtype)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    (up, down), threads = _grids(problem, config, gated=True), 32 * config["num_warps"]
    products = (Launch(f"^{flashmoe_moe_up.__name__}$", up, threads), Launch(f"^{flashmoe_moe_down.__name__}$", down, threads))
    return with_launches_around(problem, config, products)


def with_launches_around(problem: MoEProblem, config: Config, products: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """All launches of a GroupedLauncher that multiplies by ``products``, a router's before them."""
    sizes = Sizes(problem.pairs(), problem.experts, config["block_m"])
    sort = (sizes.blocks, 1, 1)
    count = (Launch("^flashmoe_moe_count$", sort, 256),) if sizes.counted else ()
    combine = Launch(f"^{flashmoe_moe_combine.__name__}$", _grid_of_combination(problem), 128)
    return (*launches_of(problem), *count, Launch(f"^{flashmoe_moe_rows.__name__}$", sort, 256), *products, combine)


def compile_job(problem: MoEProblem, config: Config, gpu: Gpu) -> CompileJob:
    """Of the first product, the largest of the kernels."""
    p = problem
    strides_1, strides_2 = (2 * p.hidden * p.dim, p.dim, 1), (p.hidden * p.dim, p.hidden, 1)
    shape = _Shape(p.experts, p.top_k, p.dim, p.hidden, p.dim, strides_1, strides_2, SWIGLU, p.dtype)
    constexprs = shape.up(config, gpu.compute_capability >= (9, 0)) | {"bias": None}
    signature = dict.fromkeys(flashmoe_moe_up.arg_names, "i32") | dict.fromkeys(("x", "w", "out"), f"*{problem.dtype}")
    signature |= {"tables": "*i32"} | dict.fromkeys(constexprs, "constexpr")
    return CompileJob(
        function=flashmoe_moe_up,
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=("x", "w", "out", "tables"),
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        threads=32 * config["num_warps"],
    )


KERNEL = MoEKernel(
    name=NAME,
    origin="ours",
    op="moe",
    about="portable Triton: rows sorted by expert, two grouped products, a sum in a fixed order",
    supports=supports,
    configs=configs,
    run=run,
    launches=launches,
    plan=plan,
    workspace=workspace,
    compile_job=compile_job,
    interpretable=True,
)
