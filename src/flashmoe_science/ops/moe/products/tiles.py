"""Tiles of a grouped product in portable Triton: rows of one expert, by columns of its weights.

Shapes: a [P, K] or gathered rows of [T, K], w [E, N, K] in any strides -> out [P, N], rows in the order of ``rows.py``. fp16,
bf16 and fp32, sums in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from flashmoe_science.ops.launch import Build, Grid, Pointer, cdiv
from flashmoe_science.ops.moe.call import KernelLaunch
from flashmoe_science.ops.moe.rows import RowCounts, Tile, tables_of

GROUP = 8  # tiles of rows whose products with one tile of weights run at about the same time, and share it in L2


@triton.jit
def tile_of(tables, pairs, tiles, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
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
def dot(a, b, acc, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    if INTERPRET:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def multiply(
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
        first = dot(x, tl.load(w_ptrs, mask=inside, other=other), first, PRECISION, INTERPRET)
        if SECOND is not None:
            second = dot(x, tl.load(w_ptrs + SECOND * STRIDE_N, mask=inside, other=other), second, PRECISION, INTERPRET)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * STRIDE_K
    return first, second


@triton.jit
def store_rows(block, out, rows, columns, tile, WIDTH: tl.constexpr, STRIDE: tl.constexpr):
    """Write the rows of a tile's expert, and of columns those below ``WIDTH``."""
    out_ptrs = out + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    tl.store(out_ptrs, block.to(out.dtype.element_ty), mask=(rows < tile.end)[:, None] & (columns < WIDTH)[None, :])


def build_product(
    function: Any, pointers: tuple[Any, ...], constexprs: dict[str, Any], num_warps: int, num_stages: int
) -> Callable[[RowCounts], KernelLaunch]:
    """bind(counts) of a kernel that has a program for each tile of rows and of columns: launch(*pointers, tables). It is built
    for ``pointers``: of each tensor before the tables what stands for it, None for none."""
    values = tuple(constexprs.values())
    arguments = (*pointers, Pointer(torch.int32), 2, 2, *values)
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": constexprs["EARLY_START"]}
    build = Build(function, arguments, **options)
    width, block_n = constexprs["WIDTH"], constexprs["BLOCK_N"]
    return lambda counts: build.bound(grid_of(counts, width, block_n), counts.pairs, counts.tiles, *values)


def grid_of(counts: RowCounts, width: int, block_n: int) -> Grid:
    """Programs for all tiles that there can be."""
    return (counts.tiles * cdiv(width, block_n), 1, 1)
