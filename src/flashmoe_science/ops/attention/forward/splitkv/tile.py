"""Attention of packed query rows to one tile of keys, in Triton: loads, contiguous or by pages, scores, mask and softmax."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashmoe_science.ops.attention.device.bias_triton import bias_log2
from flashmoe_science.ops.attention.device.mask_triton import in_band
from flashmoe_science.ops.attention.device.pages import page_of
from flashmoe_science.ops.attention.device.product_triton import product
from flashmoe_science.ops.attention.device.rows_triton import load_rows
from flashmoe_science.ops.attention.device.softcap_triton import tanh
from flashmoe_science.ops.attention.device.softmax_triton import softmax_step


class Seen(NamedTuple):
    """The keys that some row of a tile sees, [start, end), and those that all rows see, [all_start, all_end). A row sees keys
    to before its own place plus ``right_end``, and those before ``prefix``; ``diagonal``: keys less queries."""

    start: tl.tensor
    end: tl.tensor
    all_start: tl.tensor
    all_end: tl.tensor
    diagonal: tl.tensor
    right_end: tl.tensor
    prefix: tl.tensor


class QueryRows(NamedTuple):
    """Packed rows [BLOCK_M]: their queries, whether there are such, where their biases begin or ALiBi's slopes; and by what
    their scores are scaled and capped."""

    query: tl.tensor
    row_ok: tl.tensor
    bias: tl.tensor
    slope: tl.tensor
    scale_log2: tl.tensor
    cap_log2: tl.tensor
    over_cap: tl.tensor


@triton.jit
def _masked(s, key, inside, seen, query, left, traits: tl.constexpr):
    """Scores, -inf where a row does not see a key."""
    visible = inside[None, :]
    if traits.LEFT or traits.RIGHT:
        near = in_band(
            query[:, None], key[None, :], seen.end, seen.diagonal, left, seen.right_end, seen.prefix,
            traits.LEFT, traits.RIGHT, traits.PREFIX,
        )  # fmt: skip
        visible = visible & near
    return tl.where(visible, s, float("-inf"))


@triton.jit
def attend_tile(
    q, row_max, row_sum, lost, acc, number, k, v, table, seen, whole, beyond, rows, scores, traits: tl.constexpr
):  # fmt: skip
    """Attend ``q`` to the ``number``-th tile of keys, of a cache in which ``k`` and ``v`` begin, or of pages. Scores are masked
    in tiles before ``whole`` and from ``beyond`` on; in all of them where a branch costs more (ALWAYS)."""
    MASKED: tl.constexpr = traits.ENDS or traits.LEFT or traits.RIGHT or traits.BEGINS
    BLOCK_N: tl.constexpr = traits.BLOCK_N
    BLOCK_D: tl.constexpr = traits.BLOCK_D
    PAGE: tl.constexpr = traits.PAGE
    query, scale_log2 = rows.query, rows.scale_log2
    local = tl.arange(0, BLOCK_N)
    dims, dims_v = tl.arange(0, BLOCK_D), tl.arange(0, traits.BLOCK_DV)
    first_key = number * BLOCK_N
    key = first_key + local  # [BLOCK_N]
    inside = key < seen.end
    if traits.BEGINS:
        inside = inside & (key >= seen.start)
    k_head, v_head, stride_kn, stride_vn = k.base, v.base, k.stride_m, v.stride_m
    if PAGE == 0:
        if traits.WIDE:
            k_rows, v_rows = key.to(tl.int64) * stride_kn, key.to(tl.int64) * stride_vn
        else:
            k_rows, v_rows = local * stride_kn, local * stride_vn
            k_head += tl.cast(first_key, tl.int64) * stride_kn
            v_head += tl.cast(first_key, tl.int64) * stride_vn
    elif PAGE % BLOCK_N == 0:
        page, row = page_of(table, first_key, None, None, PAGE).to(tl.int64), first_key % PAGE
        k_head += page * k.stride_b + tl.cast(row, tl.int64) * stride_kn
        v_head += page * v.stride_b + tl.cast(row, tl.int64) * stride_vn
        k_rows, v_rows = local * stride_kn, local * stride_vn
    else:
        page, row = page_of(table, key, inside, 0, PAGE).to(tl.int64), (key % PAGE).to(tl.int64)
        k_rows, v_rows = page * k.stride_b + row * stride_kn, page * v.stride_b + row * stride_vn
    k_tile = load_rows(k_head, k_rows, inside, dims, traits.D, BLOCK_D, MASKED).to(q.dtype)  # [BLOCK_N, BLOCK_D]
    v_tile = load_rows(v_head, v_rows, inside, dims_v, traits.DV, traits.BLOCK_DV, MASKED).to(q.dtype)  # [BLOCK_N, BLOCK_DV]

    if traits.ALWAYS and q.dtype == tl.float32 and not traits.INTERPRET:
        # By fused multiply-adds: tensor cores truncate, which a large score's exponential shows. Four sums of a quarter of the
        # dimensions each, parts of a product of three dimensions: a single chain of 256 errs up to three times as much.
        PARTS: tl.constexpr = min(4, BLOCK_D // 16)  # Triton's products are of 16 and more
        q_parts = tl.permute(tl.reshape(q, [q.shape[0], PARTS, BLOCK_D // PARTS]), [1, 0, 2])
        k_parts = tl.permute(tl.reshape(k_tile, [BLOCK_N, PARTS, BLOCK_D // PARTS]), [1, 2, 0])
        s = tl.sum(tl.dot(q_parts, k_parts, input_precision="ieee"), 0)  # [BLOCK_M, BLOCK_N]
    else:
        s = product(q, tl.trans(k_tile), None, traits.PRECISION, traits.INTERPRET)  # [BLOCK_M, BLOCK_N]
    if traits.SOFTCAP:
        s = tanh(s * rows.over_cap) * rows.cap_log2
    elif traits.SCALE_FIRST:
        s = s * scale_log2
    if traits.BIAS == "alibi":
        s -= rows.slope[:, None] * tl.abs(query[:, None] + seen.diagonal - key[None, :]).to(tl.float32)
    elif traits.BIAS != "none":
        given = rows.row_ok[:, None] & inside[None, :]
        # Of 64 bits: a row of a bias, and a whole one, may seen 2^31 elements.
        bias = tl.load(rows.bias[:, None] + key.to(tl.int64)[None, :] * scores.bias.stride_n, mask=given, other=0)
        if traits.BIAS == "boolean":
            s = tl.where(bias != 0, s, float("-inf"))
        else:
            s += bias_log2(bias)
    if MASKED:
        if traits.ALWAYS:  # noqa: SIM114 (a branch at compile time, the other is not)
            s = _masked(s, key, inside, seen, query, scores.left, traits)
        elif (number < whole) | (number >= beyond):
            s = _masked(s, key, inside, seen, query, scores.left, traits)
    factor = 1.0 if traits.SCALE_FIRST else scale_log2
    p, row_max, row_sum, lost, rescale = softmax_step(s, row_max, row_sum, lost, factor, traits.COMPENSATED)
    acc = acc * rescale[:, None]  # [BLOCK_M, BLOCK_DV]
    acc = product(p.to(v_tile.dtype), v_tile, acc, traits.PRECISION, traits.INTERPRET)
    return row_max, row_sum, lost, acc
