"""Sums beside the products of a backward: the gradients of the routing weights and of the biases."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.moe.rows import tables_of

ROUTING_ROWS, ROUTING_COLUMNS, ROUTING_WARPS = 32, 128, 4  # of a program, and its columns at a time
BIAS_ROWS, BIAS_COLUMNS, BIAS_WARPS = 32, 64, 4


@triton.jit(do_not_specialize=["pairs"])
def flashmoe_moe_drouting(
    partials, dout, bias, ids, out, tables, pairs,
    COLUMNS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """out[pair] = the sum of its row's ``COLUMNS`` partials in their order, and with ``bias`` of dout[token] . bias[expert]; 0
    for a pair without a row."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row = tl.load(tables + pairs + pair, mask=pair < pairs, other=-1).to(tl.int64)
    acc = tl.zeros([BLOCK_M], tl.float32)
    for column in range(COLUMNS):
        acc += tl.load(partials + row * COLUMNS + column, mask=row >= 0, other=0.0)
    if bias is not None:
        expert = tl.load(ids + pair, mask=row >= 0, other=0).to(tl.int64)
        token = (pair // TOP_K).to(tl.int64)
        for first in range(0, WIDTH, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            inside = (row >= 0)[:, None] & (n < WIDTH)[None, :]
            a = tl.load(dout + token[:, None] * WIDTH + n[None, :], mask=inside, other=0.0).to(tl.float32)
            b = tl.load(bias + expert[:, None] * WIDTH + n[None, :], mask=inside, other=0.0).to(tl.float32)
            acc += tl.sum(a * b, 1)
    tl.store(out + pair, acc.to(out.dtype.element_ty), mask=pair < pairs)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_dbias(
    values, weights, out, tables, pairs, tiles,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """out[expert, n] = the sum of values[row, n] over its rows, or with ``weights`` of values[token of row, n] times weight."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    across: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    expert = tl.program_id(0) // across
    n = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    parts = tables_of(tables, pairs, EXPERTS, tiles)
    first, end = tl.load(parts.offsets + expert), tl.load(parts.offsets + expert + 1)
    acc = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    for start in range(first, end, BLOCK_K):
        row = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        place = row.to(tl.int64)
        if weights is not None:
            pair = tl.load(tables + row, mask=row < end, other=0)
            place = (pair // TOP_K).to(tl.int64)
        inside = (row < end)[:, None] & (n < WIDTH)[None, :]
        value = tl.load(values + place[:, None] * WIDTH + n[None, :], mask=inside, other=0.0).to(tl.float32)
        if weights is not None:
            value = tl.where(inside, tl.load(weights + pair).to(tl.float32)[:, None] * value, 0.0)
        acc += value
    tl.store(out + expert.to(tl.int64) * WIDTH + n, tl.sum(acc, 0).to(out.dtype.element_ty), mask=n < WIDTH)
