"""The gradient of an expert's weights: a product over its rows, in their order. An expert without rows gets 0."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.moe.products.tiles import dot
from flashmoe_science.ops.moe.rows import tables_of


@triton.jit
def _tile_of(base, expert, m, n, STRIDE_E: tl.constexpr, STRIDE_M: tl.constexpr, STRIDE_N: tl.constexpr):
    """Pointers to a tile of an expert's matrix."""
    return base + expert.to(tl.int64) * STRIDE_E + m.to(tl.int64)[:, None] * STRIDE_M + n.to(tl.int64)[None, :] * STRIDE_N


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_dweights(
    gathered, other, weights, factor, partials, out, tables, pairs, tiles,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE_X: tl.constexpr,
    STRIDE_E: tl.constexpr, STRIDE_M: tl.constexpr, STRIDE_N: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """out[expert, m, n] = the sum over its rows of gathered[token of row, m] times other[row, n], and times ``weights`` of the
    row's pair unless they are None; ``ADDS``: added to out. ``TOP_K``: None where rows are gathered of themselves, and have no
    weights. With a ``factor`` [experts, m, n] like out the other product of what is gathered, which is read once for both:
    partials[tile of m, row, n] = the sum over the tile's m of gathered[token of row, m] times factor[expert, m, n]."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    across: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    down: tl.constexpr = (HEIGHT + BLOCK_M - 1) // BLOCK_M
    index = tl.program_id(0)
    expert = index // (across * down)
    m = index // across % down * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    n = index % across * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    parts = tables_of(tables, pairs, EXPERTS, tiles)
    first, end = tl.load(parts.offsets + expert), tl.load(parts.offsets + expert + 1)
    if factor is not None:
        of_factor = (m < HEIGHT)[:, None] & (n < WIDTH)[None, :]
        beside = tl.load(_tile_of(factor, expert, m, n, STRIDE_E, STRIDE_M, STRIDE_N), mask=of_factor, other=0.0)
        part_ptrs = partials + (index // across % down).to(tl.int64) * pairs * WIDTH + n[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=NUM_STAGES):
        row = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        exists = (row < end)[:, None]
        if TOP_K is None:
            token = row.to(tl.int64)
        else:
            pair = tl.load(tables + row, mask=row < end, other=0)
            token = (pair // TOP_K).to(tl.int64)  # [BLOCK_K]
        inside = exists if HEIGHT % BLOCK_M == 0 else exists & (m < HEIGHT)[None, :]
        a = tl.load(gathered + token[:, None] * STRIDE_X + m[None, :], mask=inside, other=0.0)  # [BLOCK_K, BLOCK_M]
        inside = exists if WIDTH % BLOCK_N == 0 else exists & (n < WIDTH)[None, :]
        b = tl.load(other + row.to(tl.int64)[:, None] * WIDTH + n[None, :], mask=inside, other=0.0)  # [BLOCK_K, BLOCK_N]
        if factor is not None:
            part = dot(a, beside, tl.zeros([BLOCK_K, BLOCK_N], tl.float32), PRECISION, INTERPRET)
            tl.store(part_ptrs + row.to(tl.int64)[:, None] * WIDTH, part, mask=exists & (n < WIDTH)[None, :])
        if weights is not None:
            b = (b.to(tl.float32) * tl.load(weights + pair, mask=row < end, other=0.0).to(tl.float32)[:, None]).to(b.dtype)
        acc = dot(tl.trans(a), b, acc, PRECISION, INTERPRET)
    out_ptrs = _tile_of(out, expert, m, n, STRIDE_E, STRIDE_M, STRIDE_N)
    inside = (m < HEIGHT)[:, None] & (n < WIDTH)[None, :]
    if ADDS:
        acc += tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=inside)
