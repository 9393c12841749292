"""One tile of keys in split_triton.py: its loads, contiguous or by pages, then scores, soft cap, bias, mask and softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from flashmoe_science.ops.attention.forward.tiled_triton import _scores_to_probabilities


@triton.jit
def _tanh(x):
    """tanh, right to 2e-7 of 1 and up to 0.62 to 1e-7 of itself: there by a minimax polynomial, above by an exponential."""
    square = x * x
    odd = -0.33333283 + square * (0.13331454 + square * (-0.05374067 + square * (0.020642346 - square * 0.0057087843)))
    small = x + x * (square * odd)
    large = 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * x) + 1.0)
    return tl.where(square < 0.39, small, large)


@triton.jit
def _load_rows(head, offsets, inside, dims, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows of K or V at ``offsets`` from ``head``; zeros where not ``inside``: what a cache holds there may be NaN."""
    pointers = head + offsets[:, None] + dims[None, :]
    if MASKED:
        if D == BLOCK_D:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        return tl.load(pointers, mask=inside[:, None] & (dims[None, :] < D), other=0.0)
    if D == BLOCK_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=dims[None, :] < D, other=0.0)


@triton.jit
def _masked(
    s, key, inside, end, query, diagonal, left, right_end, prefix,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """Scores, -inf where a row does not see a key."""
    visible = inside[None, :]
    if LEFT or RIGHT:
        near = key[None, :] < end
        if RIGHT:
            near = near & (key[None, :] < query[:, None] + right_end)
        if LEFT:
            near = near & (key[None, :] >= query[:, None] + diagonal - left)
        if PREFIX:
            near = near | (key[None, :] < prefix)
        visible = visible & near
    return tl.where(visible, s, float("-inf"))


@triton.jit
def tile(
    q, k_head, v_head, table, bias_rows, slope, row_max, row_sum, lost, acc,
    number, start, end, whole, beyond, query, row_ok, diagonal, left, right_end, prefix, scale_log2, cap_log2, over_cap,
    stride_kb, stride_kn, stride_vb, stride_vn, stride_bias_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BEGINS: tl.constexpr, PREFIX: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr,
    MASKED: tl.constexpr, ALWAYS: tl.constexpr, SCALE_FIRST: tl.constexpr, PRECISION: tl.constexpr,
    COMPENSATED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Attend ``q`` to the ``number``-th tile of keys, of which those from ``start`` to before ``end`` are read. Where MASKED,
    scores are masked in tiles before ``whole`` and from ``beyond`` on; in all of them where a branch costs more (ALWAYS)."""
    keys = tl.arange(0, BLOCK_N)
    dims, dims_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    first_key = number * BLOCK_N
    key = first_key + keys
    inside = key < end
    if BEGINS:
        inside = inside & (key >= start)
    if PAGE == 0:
        if WIDE:
            k_rows, v_rows = key.to(tl.int64) * stride_kn, key.to(tl.int64) * stride_vn
        else:
            k_rows, v_rows = keys * stride_kn, keys * stride_vn
            k_head += tl.cast(first_key, tl.int64) * stride_kn
            v_head += tl.cast(first_key, tl.int64) * stride_vn
    elif PAGE % BLOCK_N == 0:
        page = tl.load(table + first_key // PAGE).to(tl.int64)
        place = first_key % PAGE
        k_head += page * stride_kb + tl.cast(place, tl.int64) * stride_kn
        v_head += page * stride_vb + tl.cast(place, tl.int64) * stride_vn
        k_rows, v_rows = keys * stride_kn, keys * stride_vn
    else:
        # An entry past the length is never read: it may be anything.
        page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
        place = (key % PAGE).to(tl.int64)
        k_rows, v_rows = page * stride_kb + place * stride_kn, page * stride_vb + place * stride_vn
    k = _load_rows(k_head, k_rows, inside, dims, D, BLOCK_D, MASKED).to(q.dtype)
    v = _load_rows(v_head, v_rows, inside, dims_v, DV, BLOCK_DV, MASKED).to(q.dtype)

    if INTERPRET:  # the interpreter's bf16 dot is wrong (Triton 3.6 to 3.9), its fp32 dot is right
        s = tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32), input_precision="ieee")
    elif ALWAYS and q.dtype == tl.float32:
        # By fused multiply-adds: tensor cores truncate, which a large score's exponential shows. Four sums of a quarter of the
        # dimensions each, parts of a product of three dimensions: a single chain of 256 errs up to three times as much.
        PARTS: tl.constexpr = min(4, BLOCK_D // 16)  # Triton's products are of 16 and more
        q_parts = tl.permute(tl.reshape(q, [q.shape[0], PARTS, BLOCK_D // PARTS]), [1, 0, 2])
        k_parts = tl.permute(tl.reshape(k, [BLOCK_N, PARTS, BLOCK_D // PARTS]), [1, 2, 0])
        s = tl.sum(tl.dot(q_parts, k_parts, input_precision="ieee"), 0)
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        s = _tanh(s * over_cap) * cap_log2
    elif SCALE_FIRST:
        s = s * scale_log2
    if BIAS == "alibi":
        s -= slope[:, None] * tl.abs(query[:, None] + diagonal - key[None, :]).to(tl.float32)
    elif BIAS != "none":
        given = row_ok[:, None] & inside[None, :]
        # Of 64 bits: a row of a bias, and a whole one, may span 2^31 elements.
        drawn = tl.load(bias_rows[:, None] + key.to(tl.int64)[None, :] * stride_bias_n, mask=given, other=0)
        if BIAS == "boolean":
            s = tl.where(drawn != 0, s, float("-inf"))
        else:
            # Not below what fp32 holds: a row of nothing but bf16's lowest number has the mean of all values. -inf stays.
            more = drawn.to(tl.float32)
            s += tl.where(more == float("-inf"), more, tl.maximum(more, -2.3e38) * 1.4426950408889634)
    if MASKED:
        if ALWAYS:  # noqa: SIM114 (known when it is compiled, the other is not)
            s = _masked(s, key, inside, end, query, diagonal, left, right_end, prefix, LEFT, RIGHT, PREFIX)
        elif (number < whole) | (number >= beyond):
            s = _masked(s, key, inside, end, query, diagonal, left, right_end, prefix, LEFT, RIGHT, PREFIX)
    factor = 1.0 if SCALE_FIRST else scale_log2
    p, row_max, row_sum, lost, rescale = _scores_to_probabilities(s, row_max, row_sum, lost, factor, COMPENSATED)
    acc = acc * rescale[:, None]
    if INTERPRET:
        acc += tl.dot(p.to(v.dtype).to(tl.float32), v.to(tl.float32), input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return row_max, row_sum, lost, acc
