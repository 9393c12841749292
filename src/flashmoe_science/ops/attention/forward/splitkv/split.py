"""Attention of a tile of packed query rows to one split of a sequence's keys, in Triton.

The bounds of the split, new keys that are appended, the loop over its tiles of keys (tile.py), and its stores: the output where
the sequence has no other split, else partials for merge_triton.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmoe_science.ops.attention.device.output_triton import lse_rows, normalized
from flashmoe_science.ops.attention.device.pages import page_of
from flashmoe_science.ops.attention.device.partials import store_sums, sums_at
from flashmoe_science.ops.attention.device.ranges import tiles_between, tiles_in_range, used_splits
from flashmoe_science.ops.attention.device.rotary import first_position, in_tables, load_rotated
from flashmoe_science.ops.attention.device.sequences import cache_of, keys_of, left_padding, packed_rows
from flashmoe_science.ops.attention.device.softmax_triton import log_sum_exp, with_sink
from flashmoe_science.ops.attention.forward.splitkv.records import Strided
from flashmoe_science.ops.attention.forward.splitkv.tile import QueryRows, Seen, attend_tile


@triton.jit
def _seen_keys(batch, first_query, first_row, seqlen_q, seqlen_k, leftpads, scores, traits: tl.constexpr):
    """The keys that a tile of rows sees."""
    last_query = tl.minimum((first_row + traits.BLOCK_M - 1) // traits.GROUP, seqlen_q - 1)
    diagonal = seqlen_k - seqlen_q
    right_end = scores.right + 1 if traits.TOPLEFT else diagonal + scores.right + 1
    start, end, all_end, prefix = 0, seqlen_k, seqlen_k, 0
    if leftpads is not None:
        start = left_padding(leftpads, batch)
    all_start = start
    if traits.PREFIX:
        prefix = tl.minimum(tl.load(scores.prefixes + batch), seqlen_k)
    if traits.RIGHT:
        end = tl.maximum(tl.minimum(end, last_query + right_end), prefix)
        all_end = tl.maximum(tl.minimum(all_end, first_query + right_end), prefix)
    if traits.LEFT:
        all_start = tl.maximum(start, last_query + diagonal - scores.left)
        if not traits.PREFIX:
            start = tl.maximum(start, first_query + diagonal - scores.left)
    end = tl.maximum(end, start)
    return Seen(start, end, all_start, all_end, diagonal, right_end, prefix)


@triton.jit
def _tiles_of_split(split, start, end, capacity, SPLIT: tl.constexpr, traits: tl.constexpr):
    """The tiles of keys of a split, [low, high); the rows of the cache of which it writes new ones, each being written by the
    program that reads it, or by the first or the last; and whether it has the sequence's first and its last tile."""
    first_tile, tiles = tiles_between(start, end, traits.BLOCK_N, traits.BEGINS)
    low, high = first_tile, first_tile + tiles
    own_low, own_high, from_start, to_end = 0, capacity, True, True
    if split.tiles is not None:
        low, top, from_start, to_end = tiles_in_range(
            first_tile, split.low_tile, split.high_tile, split.tiles, traits.MIN_TILES
        )  # fmt: skip
        high = tl.minimum(high, top)
        own_low = tl.where(from_start, 0, low * traits.BLOCK_N)
        own_high = tl.where(to_end, capacity, top * traits.BLOCK_N)
    elif SPLIT:
        used = used_splits(tiles, split.splits, traits.MIN_TILES)
        low = first_tile + tiles * split.number // used
        high = tl.where(split.number < used, first_tile + tiles * (split.number + 1) // used, low)
        own_low = tl.where(split.number == 0, 0, low * traits.BLOCK_N)
        own_high = tl.where(split.number == used - 1, capacity, high * traits.BLOCK_N)
    return low, high, own_low, own_high, from_start, to_end


@triton.jit
def _append(k_head, v_head, table, new, new_k, new_v, rows_of_new, begin, first_position, first, end, traits: tl.constexpr):
    """Write those of the new rows of a sequence and key head that belong from ``first`` to before ``end`` of its cache, K
    rotated from its first position on. ``new_k`` and ``new_v``: the rows, of which there are ``rows_of_new``."""
    rows = tl.arange(0, traits.BLOCK_NEW)
    dims, dims_v = tl.arange(0, traits.BLOCK_D), tl.arange(0, traits.BLOCK_DV)
    place = begin + rows
    written = (rows < rows_of_new) & (place >= first) & (place < end)
    if traits.PAGE == 0:
        k_lines, v_lines = place.to(tl.int64) * k_head.stride_m, place.to(tl.int64) * v_head.stride_m
    else:
        page = page_of(table, place, written, -1, traits.PAGE).to(tl.int64)
        written = written & (page >= 0) & (page < new.caches)
        line = (place % traits.PAGE).to(tl.int64)
        k_lines = page * k_head.stride_b + line * k_head.stride_m
        v_lines = page * v_head.stride_b + line * v_head.stride_m
    k_inside, v_inside = written[:, None] & (dims < traits.D)[None, :], written[:, None] & (dims_v < traits.DV)[None, :]
    k_rows, v_rows = rows.to(tl.int64) * new.k.stride_m, rows.to(tl.int64) * new.v.stride_m
    if traits.HALF > 0:
        position = in_tables(new.rotary, first_position + rows)
        # [BLOCK_NEW, BLOCK_D]
        k = load_rotated(new_k, k_rows, k_inside, dims, position, new.rotary, traits.HALF, traits.INTERLEAVED)
    else:
        k = tl.load(new_k + k_rows[:, None] + dims[None, :], mask=k_inside, other=0.0)  # [BLOCK_NEW, BLOCK_D]
    v = tl.load(new_v + v_rows[:, None] + dims_v[None, :], mask=v_inside, other=0.0)  # [BLOCK_NEW, BLOCK_DV]
    tl.store(k_head.base + k_lines[:, None] + dims[None, :], k.to(k_head.base.dtype.element_ty), mask=k_inside)
    tl.store(v_head.base + v_lines[:, None] + dims_v[None, :], v, mask=v_inside)


@triton.jit
def attend_split(
    batch, head_kv, tile_m, split, operands, sequences, scores, new, partials, SPLIT: tl.constexpr, traits: tl.constexpr
):  # fmt: skip
    """Attend a tile of rows of a sequence and key head to a split of its keys; store the output where the sequence has no other
    split, else partials."""
    STREAM_K: tl.constexpr = split.tiles is not None
    PAGE: tl.constexpr = traits.PAGE
    BLOCK_M: tl.constexpr = traits.BLOCK_M
    max_rows = sequences.seqlen_q * traits.GROUP
    first_q, seqlen_q = packed_rows(sequences.cu_seqlens_q, batch, sequences.seqlen_q)
    first_k, seqlen_k, begin = keys_of(sequences, batch)
    first_row = tile_m * BLOCK_M
    if not STREAM_K:  # which has one tile of rows, and masks those that a sequence has not
        if first_row >= seqlen_q * traits.GROUP:
            return

    first_query = first_row // traits.GROUP
    seen = _seen_keys(batch, first_query, first_row, seqlen_q, seqlen_k, sequences.leftpads, scores, traits)
    low, high, own_low, own_high, from_start, to_end = _tiles_of_split(
        split, seen.start, seen.end, sequences.seqlen_k, SPLIT, traits
    )  # fmt: skip

    # Bases of 64 bits; offsets in a tile of 32, which take half the registers, unless a tile may span 2^31 elements.
    batch64, head_kv64 = tl.cast(batch, tl.int64), tl.cast(head_kv, tl.int64)
    # Packed queries are one batch: a batch stride of 0 is passed for them.
    k, v = operands.k, operands.v
    k_head, v_head = k.base + head_kv64 * k.stride_h, v.base + head_kv64 * v.stride_h
    if PAGE == 0:
        cached = cache_of(sequences.cache_batch_idx, batch)
        k_head += cached * k.stride_b + tl.cast(first_k, tl.int64) * k.stride_m
        v_head += cached * v.stride_b + tl.cast(first_k, tl.int64) * v.stride_m
        table = None
    else:
        table = sequences.page_table + batch64 * sequences.stride_table
    k, v = Strided(k_head, k.stride_b, k.stride_h, k.stride_m), Strided(v_head, v.stride_b, v.stride_h, v.stride_m)
    position = first_position(new.rotary, batch, begin)
    if new.k.base is not None:
        if PAGE == 0:
            own_high = tl.where((cached >= 0) & (cached < new.caches), own_high, 0)
        new_k = new.k.base + batch64 * new.k.stride_b + head_kv64 * new.k.stride_h
        new_v = new.v.base + batch64 * new.v.stride_b + head_kv64 * new.v.stride_h
        # In no branch: with one, the loop below spills.
        _append(k, v, table, new, new_k, new_v, sequences.new, begin, position, own_low, own_high, traits)
        tl.debug_barrier()  # what some threads wrote, others of this program read below

    rows = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    query = rows // traits.GROUP
    head = head_kv * traits.GROUP + rows % traits.GROUP
    row_ok = rows < seqlen_q * traits.GROUP
    if SPLIT:
        slot = (split.row * tl.cast(max_rows, tl.int64) + first_row) * partials.slots + split.slot
        row_sums = 2 * partials.slots * tl.arange(0, BLOCK_M)
        sums = sums_at(partials, slot, traits.DV)
        if not STREAM_K:
            if low >= high:  # nothing of its own; the merge reads no more of it than its sum of 0
                no_max, no_sum = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
                store_sums(sums + row_sums, no_max, no_sum, row_ok)
                return

    first_head64, first_query64 = head_kv64 * traits.GROUP, tl.cast(first_q + first_query, tl.int64)
    dims, dims_v = tl.arange(0, traits.BLOCK_D), tl.arange(0, traits.BLOCK_DV)
    local_query, local_head = query - first_query, rows % traits.GROUP
    if traits.WIDE:
        local_query, local_head = local_query.to(tl.int64), local_head.to(tl.int64)
    q_all = operands.q
    q_tile = q_all.base + batch64 * q_all.stride_b + first_head64 * q_all.stride_h + first_query64 * q_all.stride_m
    q_rows = local_head * q_all.stride_h + local_query * q_all.stride_m
    q_inside = row_ok[:, None] & (dims[None, :] < traits.D)
    if traits.HALF > 0:
        positions = in_tables(new.rotary, position + query if traits.MOVING else position + 0 * query)
        q = load_rotated(q_tile, q_rows, q_inside, dims, positions, new.rotary, traits.HALF, traits.INTERLEAVED)
        q = q.to(q_tile.dtype.element_ty)  # [BLOCK_M, BLOCK_D]
    else:
        q = tl.load(q_tile + q_rows[:, None] + dims[None, :], mask=q_inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    bias_rows, slope = None, None
    if traits.BIAS == "alibi":
        slope = tl.load(scores.slopes.base + batch64 * scores.slopes.stride_b + head) * 1.4426950408889634
    elif traits.BIAS != "none":
        bias = scores.bias
        bias_rows = bias.base + batch64 * bias.stride_b + head.to(tl.int64) * bias.stride_h
        bias_rows += query.to(tl.int64) * bias.stride_m
    scale = scores.softmax_scale
    if scores.k_scale.base is not None:
        scale = scale * tl.load(scores.k_scale.base + batch64 * scores.k_scale.stride_b + head_kv * scores.k_scale.stride_h)
    scale_log2 = scale * 1.4426950408889634
    cap_log2, over_cap = 0.0, 0.0
    if traits.SOFTCAP:
        cap_log2, over_cap = scores.softcap * 1.4426950408889634, scale / scores.softcap

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    lost = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, traits.BLOCK_DV], tl.float32)
    # Tiles before ``whole`` and from ``beyond`` on have keys that some row does not see.
    whole, beyond = tl.cdiv(seen.all_start, traits.BLOCK_N), seen.all_end // traits.BLOCK_N
    query_rows = QueryRows(query, row_ok, bias_rows, slope, scale_log2, cap_log2, over_cap)
    for number in tl.range(low, high, num_stages=traits.NUM_STAGES):
        row_max, row_sum, lost, acc = attend_tile(
            q, row_max, row_sum, lost, acc, number, k, v, table, seen, whole, beyond, query_rows, scores, traits
        )  # fmt: skip

    if scores.v_scale.base is not None:
        acc = acc * tl.load(scores.v_scale.base + batch64 * scores.v_scale.stride_b + head_kv * scores.v_scale.stride_h)
    stored = row_ok[:, None] & (dims_v[None, :] < traits.DV)
    if from_start & to_end if STREAM_K else not SPLIT:  # no other program has a split of the sequence
        heads = operands.heads_kv * traits.GROUP
        if scores.sinks is not None:
            row_max, row_sum, rescale = with_sink(tl.load(scores.sinks + head), row_max, row_sum)
            acc = acc * rescale[:, None]
        acc = normalized(acc, row_sum)
        out = operands.out
        out_tile = out.base + batch64 * out.stride_b + first_head64 * out.stride_h + first_query64 * out.stride_m
        out_rows = local_head * out.stride_h + local_query * out.stride_m
        tl.store(out_tile + out_rows[:, None] + dims_v[None, :], acc.to(out_tile.dtype.element_ty), mask=stored)
        if operands.lse is not None:
            query64 = first_q + query.to(tl.int64)
            at = lse_rows(batch64, head.to(tl.int64), query64, heads, operands.stride_lse, sequences.cu_seqlens_q)
            tl.store(operands.lse + at, log_sum_exp(row_max, row_sum), mask=row_ok)
    elif SPLIT:
        partial_rows = partials.slots * traits.DV * tl.arange(0, BLOCK_M)
        outputs = partials.base + slot * traits.DV
        tl.store(outputs + partial_rows[:, None] + dims_v[None, :], acc, mask=stored)
        store_sums(sums + row_sums, row_max, row_sum, row_ok)
