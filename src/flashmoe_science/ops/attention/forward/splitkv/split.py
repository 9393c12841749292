"""One piece of a sequence's keys in split_triton.py: its bounds, new keys appended, its tiles, and what is written of it.

A program attends a tile of packed rows to a piece. The rows' output is written where the sequence has no other piece, else
partials for merge_triton.py are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmoe_science.ops.attention.device.append_triton import _rotated
from flashmoe_science.ops.attention.device.lse_triton import log_sum_exp, lse_rows, with_sink
from flashmoe_science.ops.attention.device.ranges import pieces_of, tiles_between, tiles_in_range
from flashmoe_science.ops.attention.forward.splitkv.tile import tile


@triton.jit
def _sequence(batch, cu_seqlens_q, cu_seqlens_k, cache_seqlens, seqlen_q, seqlen_k, before, new):
    """Of a sequence: its first row of packed queries, its queries, its first row of packed keys, its keys, and how many of a
    cache's are there before new ones are appended: ``before`` more than ``cache_seqlens``."""
    first_q = 0
    first_k = 0
    begin = before
    if cu_seqlens_q is not None:
        first_q = tl.load(cu_seqlens_q + batch)
        seqlen_q = tl.load(cu_seqlens_q + batch + 1) - first_q
    if cu_seqlens_k is not None:
        first_k = tl.load(cu_seqlens_k + batch)
        packed = tl.load(cu_seqlens_k + batch + 1) - first_k
        seqlen_k = packed if cache_seqlens is None else tl.minimum(tl.load(cache_seqlens + batch), packed)
    else:
        if cache_seqlens is not None:
            begin += tl.load(cache_seqlens + batch)
        seqlen_k = tl.minimum(begin + new, seqlen_k)  # never past the capacity
    return first_q, seqlen_q, first_k, seqlen_k, begin


@triton.jit
def _append(
    k_head, v_head, table, new_k, new_v, cos, sin, begin, turn, first, end, new, caches, positions, stride_kb, stride_kn,
    stride_vb, stride_vn, stride_nkn, stride_nvn, stride_cos,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_NEW: tl.constexpr,
    PAGE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write those of the new rows of a sequence and key head that lie from ``first`` to before ``end`` of its cache, K rotated
    from position ``turn`` on. ``k_head`` and ``v_head`` are of the sequence's cache, of all pages where there are pages."""
    rows = tl.arange(0, BLOCK_NEW)
    dims, dims_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    place = begin + rows
    taken = (rows < new) & (place >= first) & (place < end)
    if PAGE == 0:
        k_lines, v_lines = place.to(tl.int64) * stride_kn, place.to(tl.int64) * stride_vn
    else:
        page = tl.load(table + place // PAGE, mask=taken, other=-1).to(tl.int64)
        taken = taken & (page >= 0) & (page < caches)
        line = (place % PAGE).to(tl.int64)
        k_lines, v_lines = page * stride_kb + line * stride_kn, page * stride_vb + line * stride_vn
    k_inside, v_inside = taken[:, None] & (dims < D)[None, :], taken[:, None] & (dims_v < DV)[None, :]
    k_rows, v_rows = rows.to(tl.int64) * stride_nkn, rows.to(tl.int64) * stride_nvn
    if HALF > 0:
        position = tl.minimum(tl.maximum(turn + rows, 0), positions - 1).to(tl.int64)
        k = _rotated(new_k, k_rows, k_inside, dims, cos, sin, position, stride_cos, HALF, INTERLEAVED)
    else:
        k = tl.load(new_k + k_rows[:, None] + dims[None, :], mask=k_inside, other=0.0)
    v = tl.load(new_v + v_rows[:, None] + dims_v[None, :], mask=v_inside, other=0.0)
    tl.store(k_head + k_lines[:, None] + dims[None, :], k.to(k_head.dtype.element_ty), mask=k_inside)
    tl.store(v_head + v_lines[:, None] + dims_v[None, :], v, mask=v_inside)


@triton.jit
def piece(
    batch, head_kv, tile_m, split, in_partials, place, places, tiles_in, low_tile, high_tile,
    q_base, k_base, v_base, out_base, lse_base, partials,
    cu_seqlens_q, cu_seqlens_k, cache_seqlens, page_table, cache_batch_idx, leftpads,
    sinks, slopes, bias, prefixes, k_scales, v_scales, new_ks, new_vs, cos, sin, rotary_seqlens, softmax_scale, softcap,
    before, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, seqlen_k,
    stride_qb, stride_qh, stride_qm, stride_ob, stride_oh, stride_om,
    stride_lse, stride_table, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
    stride_ks_b, stride_ks_h, stride_vs_b, stride_vs_h,
    stride_nkb, stride_nkh, stride_nkn, stride_nvb, stride_nvh, stride_nvn,
    heads_kv, seqlen_q, splits, left, right, all_rows, new, caches, positions, stride_cos,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, MIN_TILES: tl.constexpr,
    SPLIT: tl.constexpr, RANGED: tl.constexpr, PAGE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, TOPLEFT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    ENDS: tl.constexpr, ALWAYS: tl.constexpr, WIDE: tl.constexpr,
    COMPENSATED: tl.constexpr, SCALE_FIRST: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_NEW: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, MOVING: tl.constexpr,
):  # fmt: skip
    """Attend a tile of rows of a sequence and key head to a piece of its keys: the ``split``-th of ``splits``, or (RANGED) its
    tiles from ``low_tile`` to before ``high_tile`` of ``tiles_in``.

    Writes the output where the sequence has no other piece, else partials: at ``place`` of ``places`` of each of the rows that
    are the ``in_partials``-th so many.
    """
    BEGINS: tl.constexpr = LEFT or leftpads is not None
    PREFIX: tl.constexpr = prefixes is not None
    most_rows = seqlen_q * GROUP
    capacity = seqlen_k
    first_q, seqlen_q, first_k, seqlen_k, begin = _sequence(
        batch, cu_seqlens_q, cu_seqlens_k, cache_seqlens, seqlen_q, seqlen_k, before, new
    )
    first_row = tile_m * BLOCK_M
    if not RANGED:  # which has one tile of rows, and masks those that a sequence has not
        if first_row >= seqlen_q * GROUP:
            return

    # The keys that some row sees, [start, end), and those that all rows see, [all_start, all_end).
    first_query = first_row // GROUP
    last_query = tl.minimum((first_row + BLOCK_M - 1) // GROUP, seqlen_q - 1)
    diagonal = seqlen_k - seqlen_q
    right_end = right + 1 if TOPLEFT else diagonal + right + 1
    start, end, all_end, prefix = 0, seqlen_k, seqlen_k, 0
    if leftpads is not None:
        start = tl.maximum(tl.load(leftpads + batch), 0)
    all_start = start
    if PREFIX:
        prefix = tl.minimum(tl.load(prefixes + batch), seqlen_k)
    if RIGHT:
        end = tl.maximum(tl.minimum(end, last_query + right_end), prefix)
        all_end = tl.maximum(tl.minimum(all_end, first_query + right_end), prefix)
    if LEFT:
        all_start = tl.maximum(start, last_query + diagonal - left)
        if not PREFIX:
            start = tl.maximum(start, first_query + diagonal - left)
    end = tl.maximum(end, start)

    first_tile, tiles = tiles_between(start, end, BLOCK_N, BEGINS)
    low, high = first_tile, first_tile + tiles
    own_low, own_high = 0, capacity  # of new keys: each is written by the program that reads it, or by the first or the last
    if RANGED:
        low, top, from_start, to_end = tiles_in_range(first_tile, low_tile, high_tile, tiles_in, MIN_TILES)
        high = tl.minimum(high, top)
        own_low = tl.where(from_start, 0, low * BLOCK_N)
        own_high = tl.where(to_end, capacity, top * BLOCK_N)
    elif SPLIT:
        used = pieces_of(tiles, splits, MIN_TILES)
        low = first_tile + tiles * split // used
        high = tl.where(split < used, first_tile + tiles * (split + 1) // used, low)
        own_low = tl.where(split == 0, 0, low * BLOCK_N)
        own_high = tl.where(split == used - 1, capacity, high * BLOCK_N)

    # Bases of 64 bits; offsets in a tile of 32, which take half the registers, unless a tile may span 2^31 elements.
    batch64, head_kv64 = tl.cast(batch, tl.int64), tl.cast(head_kv, tl.int64)
    # Packed queries are one batch: a batch stride of 0 is passed for them.
    k_head, v_head = k_base + head_kv64 * stride_kh, v_base + head_kv64 * stride_vh
    if PAGE == 0:
        cached = batch64
        if cache_batch_idx is not None:
            cached = tl.load(cache_batch_idx + batch).to(tl.int64)
        k_head += cached * stride_kb + tl.cast(first_k, tl.int64) * stride_kn
        v_head += cached * stride_vb + tl.cast(first_k, tl.int64) * stride_vn
        table = None
    else:
        table = page_table + batch64 * stride_table
    turn = begin
    if rotary_seqlens is not None:
        turn = tl.load(rotary_seqlens + batch)
    if new_ks is not None:
        if PAGE == 0:
            own_high = tl.where((cached >= 0) & (cached < caches), own_high, 0)
        new_k = new_ks + batch64 * stride_nkb + head_kv64 * stride_nkh
        new_v = new_vs + batch64 * stride_nvb + head_kv64 * stride_nvh
        # In no branch: with one, the loop below spills.
        _append(
            k_head, v_head, table, new_k, new_v, cos, sin, begin, turn, own_low, own_high, new, caches, positions,
            stride_kb, stride_kn, stride_vb, stride_vn, stride_nkn, stride_nvn, stride_cos,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_NEW, PAGE, HALF, INTERLEAVED,
        )  # fmt: skip
        tl.debug_barrier()  # what some threads wrote, others of this program read below

    rows = first_row + tl.arange(0, BLOCK_M)
    query = rows // GROUP
    head = head_kv * GROUP + rows % GROUP
    row_ok = rows < seqlen_q * GROUP
    if SPLIT:
        first_in_all = (in_partials * tl.cast(most_rows, tl.int64) + first_row) * places + place
        row_sums = 2 * places * tl.arange(0, BLOCK_M)
        sums = partials + tl.cast(all_rows, tl.int64) * places * DV + 2 * first_in_all
        if not RANGED:
            if low >= high:  # nothing of its own; the merge reads no more of it than its sum of 0
                tl.store(sums + row_sums, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_ok)
                tl.store(sums + row_sums + 1, tl.zeros([BLOCK_M], tl.float32), mask=row_ok)
                return

    first_head64, first_query64 = head_kv64 * GROUP, tl.cast(first_q + first_query, tl.int64)
    dims, dims_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    local_query, local_head = query - first_query, rows % GROUP
    if WIDE:
        local_query, local_head = local_query.to(tl.int64), local_head.to(tl.int64)
    q_tile = q_base + batch64 * stride_qb + first_head64 * stride_qh + first_query64 * stride_qm
    q_rows = local_head * stride_qh + local_query * stride_qm
    q_inside = row_ok[:, None] & (dims[None, :] < D)
    if HALF > 0:
        position = turn + query if MOVING else turn + 0 * query
        position = tl.minimum(tl.maximum(position, 0), positions - 1).to(tl.int64)
        q = _rotated(q_tile, q_rows, q_inside, dims, cos, sin, position, stride_cos, HALF, INTERLEAVED)
        q = q.to(q_base.dtype.element_ty)
    else:
        q = tl.load(q_tile + q_rows[:, None] + dims[None, :], mask=q_inside, other=0.0)
    bias_rows, slope = None, None
    if BIAS == "alibi":
        slope = tl.load(slopes + batch64 * stride_slopes + head) * 1.4426950408889634
    elif BIAS != "none":
        bias_rows = bias + batch64 * stride_bias_b + head.to(tl.int64) * stride_bias_h + query.to(tl.int64) * stride_bias_m
    scale = softmax_scale
    if k_scales is not None:
        scale = softmax_scale * tl.load(k_scales + batch64 * stride_ks_b + head_kv * stride_ks_h)
    scale_log2 = scale * 1.4426950408889634
    cap_log2, over_cap = 0.0, 0.0
    if SOFTCAP:
        cap_log2, over_cap = softcap * 1.4426950408889634, scale / softcap

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    lost = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # Tiles before ``whole`` and from ``beyond`` on have keys that some row does not see.
    whole, beyond = tl.cdiv(all_start, BLOCK_N), all_end // BLOCK_N
    for number in tl.range(low, high, num_stages=NUM_STAGES):
        row_max, row_sum, lost, acc = tile(
            q, k_head, v_head, table, bias_rows, slope, row_max, row_sum, lost, acc, number, start, end, whole, beyond,
            query, row_ok, diagonal, left, right_end, prefix, scale_log2, cap_log2, over_cap,
            stride_kb, stride_kn, stride_vb, stride_vn, stride_bias_n,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE, LEFT, RIGHT, BEGINS, PREFIX, SOFTCAP, BIAS, WIDE,
            ENDS or LEFT or RIGHT or BEGINS, ALWAYS, SCALE_FIRST, PRECISION, COMPENSATED, INTERPRET,
        )  # fmt: skip

    if v_scales is not None:
        acc = acc * tl.load(v_scales + batch64 * stride_vs_b + head_kv * stride_vs_h)
    stored = row_ok[:, None] & (dims_v[None, :] < DV)
    if from_start & to_end if RANGED else not SPLIT:  # no other program has a piece of the sequence
        _finish(
            out_base, lse_base, sinks, cu_seqlens_q, row_max, row_sum, acc, batch64, first_head64, first_query64, first_q, head,
            query, local_head, local_query, row_ok, stored, dims_v, heads_kv * GROUP,
            stride_ob, stride_oh, stride_om, stride_lse,
        )  # fmt: skip
    elif SPLIT:
        partial_rows = places * DV * tl.arange(0, BLOCK_M)
        tl.store(partials + first_in_all * DV + partial_rows[:, None] + dims_v[None, :], acc, mask=stored)
        tl.store(sums + row_sums, row_max, mask=row_ok)
        tl.store(sums + row_sums + 1, row_sum, mask=row_ok)


@triton.jit
def _finish(
    out_base, lse_base, sinks, cu_seqlens_q, row_max, row_sum, acc, batch64, first_head64, first_query64, first_q, head, query,
    local_head, local_query, row_ok, stored, dims_v, heads, stride_ob, stride_oh, stride_om, stride_lse,
):  # fmt: skip
    """Write the output and the log-sum-exp of rows that no other piece has a part of."""
    if sinks is not None:
        row_max, row_sum, rescale = with_sink(tl.load(sinks + head), row_max, row_sum)
        acc = acc * rescale[:, None]
    # A row that sees no key has a sum of 0: its output is 0 and its log-sum-exp log(0) = -inf.
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_tile = out_base + batch64 * stride_ob + first_head64 * stride_oh + first_query64 * stride_om
    out_rows = local_head * stride_oh + local_query * stride_om
    tl.store(out_tile + out_rows[:, None] + dims_v[None, :], acc.to(out_base.dtype.element_ty), mask=stored)
    if lse_base is not None:
        query64 = first_q + query.to(tl.int64)
        at = lse_rows(batch64, head.to(tl.int64), query64, heads, stride_lse, cu_seqlens_q)
        tl.store(lse_base + at, log_sum_exp(row_max, row_sum), mask=row_ok)
