"""The tokens of products of weights in a format: rows of x as in ``rows.py``, K permuted as the weights' (``operand.py``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.kernel import Launch
from flashmoe_science.ops.launch import Build, Grid, Pointer, cdiv, stand_in
from flashmoe_science.ops.moe.call import KernelLaunch
from flashmoe_science.ops.moe.products.weights_sm90.operand import STEP
from flashmoe_science.ops.moe.rows import RowCounts, tables_of

_ROWS, _COLUMNS, _WARPS = 4, 1024, 4  # of a program


@triton.jit
def permuted(values, SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows whose K is in the order of the operand (``operand.py``)."""
    if SPAN == 32:
        parts = tl.reshape(values, [ROWS * COLUMNS // 128, 4, 2, 2, 2, 2, 2])  # [, q, c, b, u, j, t]
        return tl.reshape(tl.permute(parts, (0, 2, 3, 5, 6, 1, 4)), [ROWS, COLUMNS])  # [, c, b, j, t, q, u]
    else:
        parts = tl.reshape(values, [ROWS * COLUMNS // 64, 4, 4, 2, 2])  # [, q, w, u, j]
        return tl.reshape(tl.permute(parts, (0, 2, 4, 1, 3)), [ROWS, COLUMNS])  # [, w, j, q, u]


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_permute(
    x, out, flags, tables, pairs, tiles,
    FLAGS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, DEPTH: tl.constexpr, PADDED: tl.constexpr,
    STRIDE_X: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """out[row] = x[token of row], ``permuted``, 0 from ``DEPTH`` on, and ``FLAGS`` flags of 0. The kernels after this
    one may read tables before it ends: it lets them start only once it has them."""
    if EARLY_START:
        gdc_wait()
        gdc_launch_dependents()
    parts = tables_of(tables, pairs, EXPERTS, tiles)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    exists = row < tl.load(parts.offsets + EXPERTS)
    token = tl.load(parts.pair_of_row + row, mask=exists, other=0) // TOP_K
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS], and its places
    inside = exists[:, None] & (k < DEPTH)[None, :]
    values = tl.load(x + token.to(tl.int64)[:, None] * STRIDE_X + k[None, :], mask=inside, other=0.0)  # [ROWS, COLUMNS]
    written = exists[:, None] & (k < PADDED)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * PADDED + k[None, :], permuted(values, SPAN, ROWS, COLUMNS), mask=written)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        number = tl.arange(0, triton.next_power_of_2(FLAGS))
        tl.store(flags + number, 0, mask=number < FLAGS)


def padded(depth: int) -> int:
    """Elements of a row whose K is permuted."""
    step: int = STEP.value
    return cdiv(depth, step) * step


def build(
    x: torch.Tensor, span: int, experts: int, top_k: int, flags: int, early_start: bool
) -> Callable[[RowCounts], KernelLaunch]:
    """bind(counts): launch(x, out, flags, tables) for rows of x like these: out [pairs, padded(columns of x)], int32 flags."""
    depth = x.shape[1]
    values = flags, experts, top_k, depth, padded(depth), x.stride(0), span, _ROWS, _COLUMNS, early_start
    arguments = (stand_in(x), Pointer(x.dtype), Pointer(torch.int32), Pointer(torch.int32), 2, 2, *values)
    built = Build(flashmoe_moe_permute, arguments, num_warps=_WARPS, launch_pdl=early_start)
    return lambda rows: built.bound(_grid(rows, depth), rows.pairs, rows.tiles, *values)


def launch_of(rows: RowCounts, depth: int) -> Launch:
    """The launch of ``build``."""
    return Launch(f"^{flashmoe_moe_permute.__name__}$", _grid(rows, depth), 32 * _WARPS)


def _grid(rows: RowCounts, depth: int) -> Grid:
    return cdiv(rows.pairs, _ROWS), cdiv(padded(depth), _COLUMNS), 1
