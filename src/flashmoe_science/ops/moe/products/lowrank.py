"""The low-rank side of an adapter, in portable Triton: scaling times its first factor times each row, [rows, rank].

Hopper's products take it as more of their depth (``products/gluon_sm90``). A tile has all of a rank up to 128, so that a row is
read once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.launch import INTERPRETING, Build, Pointer, argument, cdiv, next_power_of_2, stand_in
from flashmoe_science.ops.moe.call import KernelLaunch
from flashmoe_science.ops.moe.call.adapters import LowRank
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.grouped import Product, starts_early
from flashmoe_science.ops.moe.products.tiles import GROUP, build_product, multiply, store_rows, tile_of

MOST_COLUMNS = 128  # of a tile
_BLOCK_K, _STAGES = 64, 4
_ELEMENTS = 1024  # of a program of a sum


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_lowrank(
    a, w, out, scaling, tables, pairs, tiles,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE_A: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """One tile of out[row, n] = scaling times a[token of row] . w[expert, n]; of a[row] where ``TOP_K`` is None."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    exists, tile = tile_of(tables, pairs, tiles, EXPERTS, WIDTH, BLOCK_N, GROUP)
    if exists:
        rows = tile.row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        of_a = rows if TOP_K is None else tl.load(tables + rows, mask=rows < tile.end, other=0) // TOP_K
        columns = tile.column + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        even: tl.constexpr = DEPTH % BLOCK_K == 0 and WIDTH % BLOCK_N == 0
        acc, _ = multiply(
            a, w, tile, rows, of_a, columns, even, WIDTH, None,
            DEPTH, STRIDE_A, STRIDE_E, STRIDE_N, STRIDE_K, BLOCK_K, NUM_STAGES, PRECISION, INTERPRET,
        )  # fmt: skip
        store_rows(scaling * acc, out, rows, columns, tile, WIDTH, WIDTH)


@triton.jit(do_not_specialize=["pairs"])
def flashmoe_moe_lowrank_sum(
    partials, out, scaling, pairs, WIDTH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, EARLY_START: tl.constexpr
):  # fmt: skip
    """out [pairs, WIDTH] = scaling times the sum of ``COUNT`` partials, in their order."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    elements = pairs.to(tl.int64) * WIDTH
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    acc = tl.zeros([BLOCK], tl.float32)
    for part in range(COUNT):
        acc += tl.load(partials + part * elements + at, mask=at < elements, other=0.0)
    tl.store(out + at, (scaling * acc).to(out.dtype.element_ty), mask=at < elements)


def columns_of_rank(rank: int) -> int:
    """Columns of a tile of a product of that rank."""
    return min(MOST_COLUMNS, max(16, next_power_of_2(rank)))


def build_lowrank(problem: MoEProblem, x: torch.Tensor, block_m: int, low: LowRank, stride: int, gathered: bool) -> Product:
    """launch(a, w, out, scaling, tables) of the ``a`` of an adapter like ``low``, for rows of the dtype of x which are
    ``stride`` apart: ``gathered`` by their tokens, or in their order."""
    (experts, rank, depth), block_n = low.a.shape, columns_of_rank(low.a.shape[1])
    of_expert, of_row, of_column = low.a.stride()
    constexprs = {
        "EXPERTS": experts, "TOP_K": problem.top_k if gathered else None, "DEPTH": depth, "WIDTH": rank,
        "STRIDE_A": stride, "STRIDE_E": of_expert, "STRIDE_N": of_row, "STRIDE_K": of_column,
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": _BLOCK_K, "GROUP": GROUP, "NUM_STAGES": _STAGES,
        "PRECISION": "tf32", "INTERPRET": INTERPRETING, "EARLY_START": starts_early(x),
    }  # fmt: skip
    new = Pointer(x.dtype)
    pointers = (stand_in(x) if gathered else new, stand_in(low.a), new, 0.5)
    return build_product(flashmoe_moe_lowrank, pointers, constexprs, 4 if block_n < MOST_COLUMNS else 8, _STAGES)


def build_sum(x: torch.Tensor, rank: int, count: int) -> Product:
    """launch(partials, out, scaling) of ``count`` partials [rows, rank]."""
    values = (rank, count, _ELEMENTS, starts_early(x))
    arguments = (Pointer(torch.float32), Pointer(x.dtype), 0.5, 2, *values)
    build = Build(flashmoe_moe_lowrank_sum, arguments, num_warps=4, launch_pdl=starts_early(x))

    return lambda counts: build.bound((cdiv(counts.pairs * rank, _ELEMENTS), 1, 1), counts.pairs, *values)


def beside(start: KernelLaunch | None, a: Any, low: LowRank | None, out: Any, tables: Any) -> tuple[Any, ...]:
    """Launch the low-rank side of an adapter and return what its product takes last: the rows and the other factor's address.
    Nothing of no adapter."""
    if start is None or low is None:
        return ()
    start(a, argument(low.a), out, low.scaling, tables)
    return out, argument(low.b)
