"""Attention of every serving mode in portable Triton: packed query heads, keys split over programs, partials merged in order.

Shapes: as ops/attention/modes.py says. Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv] -> O [B, H, Sq, Dv] and
LSE [B, H, Sq]; or a cache of keys and values, contiguous or in pages, with its lengths on the device; or packed queries. fp16,
bf16 and fp32, an e4m3 cache with 16-bit queries; D and Dv from 1 to 256; sm_80 and up.

A program has a tile of packed rows of one sequence and one key head: row r is query r // group of head r % group among those
that share the key head, so that K and V are read once for all of them. It walks a contiguous piece of the keys that its rows
see. Where keys are split, each program leaves its running maximum, its sum and its unscaled output in fp32, and
``flashmoe_merge_triton`` adds them in the order of the splits: equal calls give equal bits. Nothing waits for the host: grids
come from the most queries and the capacity, programs without work exit, so that a graph captured at some lengths serves others.
Where sequences take turns and have lengths of their own that the device alone knows, each program reads all lengths, and the
longest sequences start first. Of many keys the lengths also decide, on the device, whether programs take pieces of one sequence
each, or, where one is much longer than the others, equal ranges of the keys of all: the end of one sequence, whole ones and the
beginning of another.

Splitting the keys: Dao et al. 2023 (Flash-Decoding). Online softmax: Milakov and Gimelshein 2018. The longest first: Graham
1969 (list scheduling).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import CannotServe, CompileJob, Config, Launch
from flashmoe_science.ops.attention.append_fallback import Append
from flashmoe_science.ops.attention.append_triton import _rotated
from flashmoe_science.ops.attention.fwd_triton import PLAIN_SUM, _scores_to_probabilities, log2_of_sum
from flashmoe_science.ops.attention.inputs import (
    AttentionInputs,
    AttentionKernel,
    AttentionOutput,
    BoundLaunch,
    Launcher,
    Shapes,
    strides_like,
)
from flashmoe_science.ops.attention.modes import PLAIN, Extras
from flashmoe_science.ops.attention.problem import KEY_CLASS, AttentionProblem, padded_head_dim
from flashmoe_science.ops.attention.split_launch import (
    Splits,
    Work,
    configs,
    main_grid,
    min_tiles,
    partials_of,
    places_of,
    resident,
    rounded_keys,
    span_of,
    splits_for,
    splits_in,
    suits,
    supports,
    uneven_of,
    work_of,
    workspace,
)
from flashmoe_science.ops.launch import (
    INTERPRETING,
    Build,
    Pointer,
    address,
    allocator,
    argument,
    can_start_early,
    cdiv,
    next_power_of_2,
    stride_class,
    stride_unit,
)
from flashmoe_science.ops.plan import MOST_CALLS, Cache

NAME = "split_triton"
# Not specialised on: a new batch, length or window must not compile anew.
SIZES = (
    "heads_kv", "seqlen_q", "seqlen_k", "splits", "ranges", "batches", "even_slope", "even_least", "left", "right", "all_rows",
    "stride_lse", "stride_table", "stride_slopes", "stride_ks_b", "stride_ks_h", "stride_vs_b", "stride_vs_h", "before", "new",
    "caches", "positions", "stride_cos",
)  # fmt: skip
_STRIDES = tuple(f"stride_{one}" for one in ("qb", "qh", "qm", "kb", "kh", "kn", "vb", "vh", "vn", "ob", "oh", "om"))
MERGE_SIZES = (
    "before", "seqlen_k", "stride_ob", "stride_oh", "stride_om", "stride_lse", "heads_kv", "seqlen_q", "splits", "places",
    "batches", "even_slope", "even_least", "rows", "new",
)  # fmt: skip


@triton.jit
def _tanh(x):
    """tanh, right to 2e-7 of 1 and up to 0.62 to 1e-7 of itself: there by a minimax polynomial, above by an exponential."""
    square = x * x
    odd = -0.33333283 + square * (0.13331454 + square * (-0.05374067 + square * (0.020642346 - square * 0.0057087843)))
    small = x + x * (square * odd)
    large = 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * x) + 1.0)
    return tl.where(square < 0.39, small, large)


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
def _longest(cache_seqlens, place, batches, BATCHES: tl.constexpr):
    """The sequence at a place, from 0 on, among ``batches`` in the order of their lengths, the longest first and equal ones as
    they come; there are BATCHES of them at the most. Lengths may be negative: what is past the sequences comes after all."""
    row, column = tl.arange(0, BATCHES)[:, None], tl.arange(0, BATCHES)[None, :]
    own = tl.load(cache_seqlens + row, mask=row < batches, other=-2147483648)
    others = tl.load(cache_seqlens + column, mask=column < batches, other=-2147483648)
    before = (others > own) | ((others == own) & (column < row))
    places = tl.sum(before.to(tl.int32), 1)
    return tl.sum(tl.where(places == place, tl.arange(0, BATCHES), 0), 0)


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
def _tile(
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
def with_sink(sink, row_max, row_sum):
    """The maximum and the sum with a logit more, and by what to scale what was summed before."""
    sink = sink.to(tl.float32) * 1.4426950408889634
    new_max = tl.maximum(row_max, sink)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - shift)
    return new_max, row_sum * rescale + tl.exp2(sink - shift), rescale


@triton.jit
def _log_sum_exp(row_max, row_sum):
    """Natural logarithm; -inf for an empty sum."""
    return (tl.where(row_max == float("-inf"), 0.0, row_max) + log2_of_sum(row_sum)) * 0.6931471805599453


@triton.jit
def _tiles_of(cache_seqlens, leftpads, batch, batches, before, new, capacity, BLOCK_N: tl.constexpr, CACHED: tl.constexpr):
    """How many tiles have keys of sequences, none of those past ``batches``. CACHED: lengths may come from the SM's cache."""
    modifier: tl.constexpr = "" if CACHED else ".cg"
    length = before + tl.load(cache_seqlens + batch, mask=batch < batches, other=0, cache_modifier=modifier) + new
    tiles = tl.cdiv(tl.maximum(tl.minimum(length, capacity), 0), BLOCK_N)
    if leftpads is not None:
        pad = tl.load(leftpads + batch, mask=batch < batches, other=0, cache_modifier=modifier)
        tiles = tl.maximum(tiles - tl.maximum(pad, 0) // BLOCK_N, 0)
    return tl.where(batch < batches, tiles, 0)


@triton.jit
def _takes_ranges(tiles, even_slope, even_least):
    """Whether programs take equal ranges of all sequences' keys, and the tiles of all. Both kernels ask, and must decide alike:
    one operation, which no compiler takes apart."""
    total = tl.sum(tiles, 0)
    return tl.max(tiles, 0).to(tl.float32) > tl.fma(even_slope, total.to(tl.float32), even_least), total


@triton.jit
def _sequences_in(tiles, total, number, ranges, batches, BATCHES: tl.constexpr, MIN_TILES: tl.constexpr):
    """Of the ``number``-th of equal ranges of the tiles of all sequences, ``total``: its first sequence and the one past its
    last, the unit at which the first begins, the units of the range, from one to before the other, and all units.

    A sequence is as many units as it has tiles, and before them MIN_TILES for the time that it takes to begin. No piece has
    fewer than 2 * MIN_TILES tiles where its sequence has more: a range that would end before so many does not begin that
    sequence, or takes the rest of it.
    """
    sequence = tl.arange(0, BATCHES)
    units = total + batches * MIN_TILES
    low = number * units // ranges
    high = tl.where(number < ranges - 1, (number + 1) * units // ranges, 1 << 30)
    own = tl.where(sequence < batches, tiles + MIN_TILES, 0)
    end = tl.cumsum(own, 0)
    enough = end - tiles + 2 * MIN_TILES
    passed = (sequence < batches) & (end - 2 * MIN_TILES < low) & (enough <= low)
    begun = (sequence < batches) & (enough <= high) & (number < ranges)
    first, past = tl.sum(passed.to(tl.int32), 0), tl.sum(begun.to(tl.int32), 0)
    return first, past, tl.sum(tl.where(passed, own, 0), 0), low, high, units


@triton.jit
def _tell(partials, all_rows, places, batch, place, pieces, DV: tl.constexpr):
    """Tell the merge the first place of a sequence's partials and how many they are."""
    told = partials + tl.cast(all_rows, tl.int64) * places * (DV + 2) + 2 * batch
    tl.store(told, place.to(tl.float32))
    tl.store(told + 1, pieces.to(tl.float32))


@triton.jit
def _piece(
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

    first_tile = start // BLOCK_N
    tiles = tl.cdiv(end, BLOCK_N) - first_tile
    if BEGINS:
        tiles = tl.where(end > start, tiles, 0)
    low, high = first_tile, first_tile + tiles
    own_low, own_high = 0, capacity  # of new keys: each is written by the program that reads it, or by the first or the last
    if RANGED:
        from_start, to_end = low_tile < 2 * MIN_TILES, tiles_in - high_tile < 2 * MIN_TILES
        low = first_tile + tl.where(from_start, 0, low_tile)
        top = first_tile + tl.where(to_end, tiles_in, high_tile)
        high = tl.minimum(high, top)
        own_low = tl.where(from_start, 0, low * BLOCK_N)
        own_high = tl.where(to_end, capacity, top * BLOCK_N)
    elif SPLIT:
        used = tl.maximum(tl.minimum(splits, tl.cdiv(tiles, MIN_TILES)), 1)
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
        row_max, row_sum, lost, acc = _tile(
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
        lse_rows = _lse_rows(batch64, head.to(tl.int64), query64, heads, stride_lse, cu_seqlens_q)
        tl.store(lse_base + lse_rows, _log_sum_exp(row_max, row_sum), mask=row_ok)


@triton.jit(do_not_specialize=SIZES)
def flashmoe_split_triton(
    q_base, k_base, v_base, out_base, lse_base, partials,
    cu_seqlens_q, cu_seqlens_k, cache_seqlens, page_table, cache_batch_idx, leftpads,
    sinks, slopes, bias, prefixes, k_scales, v_scales, new_ks, new_vs, cos, sin, rotary_seqlens, softmax_scale, softcap,
    before, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, seqlen_k,
    stride_qb, stride_qh, stride_qm, stride_ob, stride_oh, stride_om,
    stride_lse, stride_table, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
    stride_ks_b, stride_ks_h, stride_vs_b, stride_vs_h,
    stride_nkb, stride_nkh, stride_nkn, stride_nvb, stride_nvh, stride_nvn,
    heads_kv, seqlen_q, splits, ranges, batches, even_slope, even_least, left, right, all_rows,
    new, caches, positions, stride_cos,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, MIN_TILES: tl.constexpr,
    ONE_TILE: tl.constexpr, SPLIT: tl.constexpr, RANGED: tl.constexpr, ORDERED: tl.constexpr, BATCHES: tl.constexpr,
    PAGE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, TOPLEFT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    ENDS: tl.constexpr, ALWAYS: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    COMPENSATED: tl.constexpr, SCALE_FIRST: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    EARLY_START: tl.constexpr, BLOCK_NEW: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, MOVING: tl.constexpr,
):  # fmt: skip
    if UNIT > 1:  # see stride_unit
        stride_qb, stride_qh, stride_qm = stride_qb // UNIT * UNIT, stride_qh // UNIT * UNIT, stride_qm // UNIT * UNIT
        stride_kb, stride_kh, stride_kn = stride_kb // UNIT * UNIT, stride_kh // UNIT * UNIT, stride_kn // UNIT * UNIT
        stride_vb, stride_vh, stride_vn = stride_vb // UNIT * UNIT, stride_vh // UNIT * UNIT, stride_vn // UNIT * UNIT
        stride_ob, stride_oh, stride_om = stride_ob // UNIT * UNIT, stride_oh // UNIT * UNIT, stride_om // UNIT * UNIT
    tile_m, rest = 0, tl.program_id(0)
    if not ONE_TILE:
        tiles_m = tl.cdiv(seqlen_q * GROUP, BLOCK_M)
        tile_m, rest = rest % tiles_m, rest // tiles_m
        if RIGHT:  # the last rows see the most keys: start them first
            tile_m = tiles_m - 1 - tile_m
    split = tl.program_id(1)
    if EARLY_START:
        if SPLIT and not RANGED:
            gdc_launch_dependents()  # the merge may set itself up; it waits for this kernel's end
        gdc_wait()  # the kernel before this one has finished and its results are visible from here on
        if RANGED:
            gdc_launch_dependents()  # not before: the merge reads lengths as it starts
    batch, head_kv = rest // heads_kv, rest % heads_kv
    if BATCHES > 0:  # one tile of rows, and a grid of one dimension
        number = batch
        batch, split = number // splits, number % splits
    ranged, places = False, splits
    if RANGED:
        # Pieces may be of any sequence: partials have places for all, of each of the rows of a key head.
        places = tl.maximum(batches * splits, batches + ranges)
        tiles = _tiles_of(cache_seqlens, leftpads, tl.arange(0, BATCHES), batches, before, new, seqlen_k, BLOCK_N, True)
        ranged, total = _takes_ranges(tiles, even_slope, even_least)  # all programs see the same lengths and decide alike
    shared = (
        q_base, k_base, v_base, out_base, lse_base, partials,
        cu_seqlens_q, cu_seqlens_k, cache_seqlens, page_table, cache_batch_idx, leftpads,
        sinks, slopes, bias, prefixes, k_scales, v_scales, new_ks, new_vs, cos, sin, rotary_seqlens, softmax_scale, softcap,
        before, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, seqlen_k,
        stride_qb, stride_qh, stride_qm, stride_ob, stride_oh, stride_om,
        stride_lse, stride_table, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
        stride_ks_b, stride_ks_h, stride_vs_b, stride_vs_h,
        stride_nkb, stride_nkh, stride_nkn, stride_nvb, stride_nvh, stride_nvn,
        heads_kv, seqlen_q, splits, left, right, all_rows, new, caches, positions, stride_cos,
    )  # fmt: skip
    if ranged == 0:  # before the other way, so that its code follows at once
        if RANGED:
            if batch >= batches:
                return
        if ORDERED:  # the pieces of the longest sequence start first, those of the shortest fill the end
            batch = _longest(cache_seqlens, batch, batches, BATCHES)
        in_partials, place = batch * heads_kv + head_kv, split
        if RANGED:
            in_partials, place = head_kv, batch * splits + split
        _piece(
            batch, head_kv, tile_m, split, in_partials, place, places, 0, 0, 0,
            *shared,
            GROUP, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, NUM_STAGES, MIN_TILES, SPLIT, False, PAGE,
            LEFT, RIGHT, TOPLEFT, SOFTCAP, BIAS, ENDS, ALWAYS, WIDE, COMPENSATED, SCALE_FIRST, PRECISION, INTERPRET,
            BLOCK_NEW, HALF, INTERLEAVED, MOVING,
        )  # fmt: skip
        return
    if RANGED:
        first, past, begin, low, high, units = _sequences_in(tiles, total, number, ranges, batches, BATCHES, MIN_TILES)
        for one in range(first, past):
            tiles_in = _tiles_of(cache_seqlens, leftpads, one, batches, before, new, seqlen_k, BLOCK_N, True)
            low_tile, high_tile = low - begin - MIN_TILES, high - begin - MIN_TILES
            begin += MIN_TILES + tiles_in
            if (head_kv == 0) & (low_tile < 2 * MIN_TILES):  # the sequence's first piece
                last = ((begin - 2 * MIN_TILES + 1) * ranges - 1) // units
                pieces = tl.maximum(tl.minimum(last, ranges - 1) - number, 0) + 1
                _tell(partials, all_rows, places, one, one + number, pieces, DV)
            _piece(
                one, head_kv, 0, 0, head_kv, one + number, places, tiles_in, low_tile, high_tile,
                *shared,
                GROUP, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, NUM_STAGES, MIN_TILES, True, True, PAGE,
                LEFT, RIGHT, TOPLEFT, SOFTCAP, BIAS, ENDS, ALWAYS, WIDE, COMPENSATED, SCALE_FIRST, PRECISION, INTERPRET,
                BLOCK_NEW, HALF, INTERLEAVED, MOVING,
            )  # fmt: skip


@triton.jit
def _lse_rows(batch, head, query, heads, stride, cu_seqlens_q):
    """Where the log-sum-exp of a row lies in [batch, heads, seqlen_q], or of packed queries in [heads, total_q]."""
    if cu_seqlens_q is not None:
        return head * stride + query
    return (batch * heads + head) * stride + query


@triton.jit
def _merged(
    sums, values, splits, dims, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, ALL_SPLITS: tl.constexpr
):  # fmt: skip
    """Maximum, sum and unscaled columns ``dims`` of a row of which there are ``splits`` partials, at most ALL_SPLITS."""
    split = tl.arange(0, ALL_SPLITS)
    all_max = tl.load(sums + 2 * split, mask=split < splits, other=float("-inf"))
    if BLOCK_S == ALL_SPLITS:
        own_sum = tl.load(sums + 2 * split + 1, mask=split < splits, other=0.0)
        # Not after the sums, which say what is unused: that would be a wait more.
        given = (split < splits)[:, None] & (dims[None, :] < DV)
        values = tl.load(values + split[:, None] * DV + dims[None, :], mask=given, other=0.0)
        row_max = tl.max(all_max, 0)
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        weight = tl.exp2(all_max - shift)
        # What a split without keys left unwritten may be NaN. (A sum of NaN is not 0: it is kept.)
        acc = tl.sum(tl.where((own_sum != 0.0)[:, None], values * weight[:, None], 0.0), 0)
        row_sum = tl.sum(own_sum * weight, 0)
    else:
        row_max = tl.max(all_max, 0)
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        acc = tl.zeros([BLOCK_DV], tl.float32)
        row_sum = 0.0
        for begin in range(0, splits, BLOCK_S):
            part = begin + tl.arange(0, BLOCK_S)
            part_sum = tl.load(sums + 2 * part + 1, mask=part < splits, other=0.0)
            part_weight = tl.exp2(tl.load(sums + 2 * part, mask=part < splits, other=float("-inf")) - shift)
            given = (part < splits)[:, None] & (dims[None, :] < DV)
            part_values = tl.load(values + part[:, None] * DV + dims[None, :], mask=given, other=0.0)
            acc += tl.sum(tl.where((part_sum != 0.0)[:, None], part_values * part_weight[:, None], 0.0), 0)
            row_sum += tl.sum(part_sum * part_weight, 0)
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=MERGE_SIZES)
def flashmoe_merge_triton(
    partials, out_base, lse_base, sinks, cu_seqlens_q, cache_seqlens, leftpads, before, seqlen_k,
    stride_ob, stride_oh, stride_om, stride_lse, heads_kv, seqlen_q, splits, places, batches, even_slope, even_least, rows, new,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, ALL_SPLITS: tl.constexpr,
    RANGES_S: tl.constexpr, ALL_RANGES: tl.constexpr, BATCHES: tl.constexpr, BLOCK_N: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK_DV columns of the partials of a row, [rows, places, DV] and then [rows, places, 2] of maxima and sums, in the
    order of its places: of its ``splits`` pieces.

    Where programs may take ranges (ALL_RANGES > 0) rows are those of one sequence, and sequences' places follow one another.
    Where programs take them there are after the sums, for each sequence, its first place and how many it has, at most
    ALL_RANGES; where that is one the row is written already.
    """
    row = tl.program_id(0)
    most_rows = seqlen_q * GROUP
    sequence, row_in = row // most_rows, row % most_rows
    batch, query = sequence // heads_kv, row_in // GROUP
    head = sequence % heads_kv * GROUP + row_in % GROUP
    ranged = False
    if ALL_RANGES > 0:
        # Before the main kernel's end: its programs have begun, so that lengths are there. Not from a cache that may be old.
        tiles = _tiles_of(cache_seqlens, leftpads, tl.arange(0, BATCHES), batches, before, new, seqlen_k, BLOCK_N, False)
        ranged, _ = _takes_ranges(tiles, even_slope, even_least)
        if ALL_SPLITS == 1:  # nothing to merge in pieces; but one program waits, as this kernel must not end first
            if (ranged == 0) & (row > 0):
                return
    if EARLY_START:
        gdc_wait()
    if ALL_RANGES > 0 and ALL_SPLITS == 1:
        if ranged == 0:
            return
    first_q = 0
    if cu_seqlens_q is not None:
        first_q = tl.load(cu_seqlens_q + batch)
        if query >= tl.load(cu_seqlens_q + batch + 1) - first_q:
            return
    own_row, first_place = row, 0
    if ALL_RANGES > 0:
        own_row, first_place = row % rows, batch * splits
        if ranged:
            told = partials + tl.cast(rows, tl.int64) * places * (DV + 2) + 2 * batch
            first_place, splits = tl.load(told).to(tl.int32), tl.load(told + 1).to(tl.int32)
            if splits == 1:
                return
    first = tl.cast(own_row, tl.int64) * places + first_place
    sums = partials + tl.cast(rows, tl.int64) * places * DV + 2 * first
    values = partials + first * DV
    dims = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    if ALL_RANGES == 0:
        row_max, row_sum, acc = _merged(sums, values, splits, dims, DV, BLOCK_DV, BLOCK_S, ALL_SPLITS)
    elif ALL_SPLITS == 1:  # noqa: SIM114 (known when it is compiled, the other is not)
        row_max, row_sum, acc = _merged(sums, values, splits, dims, DV, BLOCK_DV, RANGES_S, ALL_RANGES)
    elif ranged:
        row_max, row_sum, acc = _merged(sums, values, splits, dims, DV, BLOCK_DV, RANGES_S, ALL_RANGES)
    else:  # fewer partials: less to load and to run through
        row_max, row_sum, acc = _merged(sums, values, splits, dims, DV, BLOCK_DV, BLOCK_S, ALL_SPLITS)
    if sinks is not None:
        row_max, row_sum, rescale = with_sink(tl.load(sinks + head), row_max, row_sum)
        acc = acc * rescale
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)
    batch64, head64, query64 = tl.cast(batch, tl.int64), tl.cast(head, tl.int64), first_q + tl.cast(query, tl.int64)
    out_row = out_base + batch64 * stride_ob + head64 * stride_oh + query64 * stride_om
    tl.store(out_row + dims, acc.to(out_base.dtype.element_ty), mask=dims < DV)
    if lse_base is not None and tl.program_id(1) == 0:
        lse_row = _lse_rows(batch64, head64, query64, heads_kv * GROUP, stride_lse, cu_seqlens_q)
        tl.store(lse_base + lse_row, _log_sum_exp(row_max, row_sum))


# The launch -------------------------------------------------------------------------------------------------------------------

_MERGED_COLUMNS = 32  # of a program of the merge where each row has an SM to itself
_MERGED_AT_ONCE = 8192  # numbers of partials that a program of the merge has in flight
_RANGES_AT_ONCE = 2048  # the same of ranges, of which most sequences have few
_NO_BIAS = (0, 0, 0, 0)
# (tensors in the order of cache_calls.Tensors, the keys of all sequences where no lengths are given, the scale or None for the
# default): the output with tokens before heads and the log-sum-exp; None where a tensor is not aligned as those bound to.
CacheLaunch = Callable[
    [tuple[torch.Tensor | None, ...], int, float | None], tuple[torch.Tensor, torch.Tensor | None] | None
]
_MOST_NEW = 16  # rows of a sequence that the kernel appends
_FAR = 2**30  # a window that hides nothing; positions plus this still fit 32 bits


class _OfNew(NamedTuple):
    """What a launch is bound to of an Append: three strides of K and of V, sizes, and what a build is specialised on."""

    strides: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    sizes: tuple[int, ...] = (0, 0, 0, 0)  # new rows, caches or pages, positions that the tables have, their stride
    constexprs: tuple[int, ...] = (0, 0, 0, 0)  # BLOCK_NEW, HALF, INTERLEAVED, MOVING
    pointers: tuple[torch.dtype | None, ...] = (None,) * 5  # of new K and V, cos, sin, and the lengths that rotate


NO_NEW = _OfNew()


class _Sizes(NamedTuple):
    """What a launch is bound to beside its plan: sizes and strides. ``of_keys``: three strides of K, three of V, and the
    capacity, past which nothing is read. ``keys``: the most keys that a sequence has here, for the number of splits."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    keys: int
    stride_lse: int
    of_keys: tuple[int, ...]
    strides: tuple[int, ...]  # of Q and O, three each
    stride_bias: tuple[int, ...] = _NO_BIAS
    stride_table: int = 0
    stride_slopes: int = 0
    stride_scales: tuple[int, ...] = (0, 0, 0, 0)  # of k_scale and v_scale
    of_new: _OfNew = NO_NEW


class _Variant(NamedTuple):
    """What a build is specialised on beside its plan, and sizes decide."""

    group: int
    one_tile: bool
    split: bool
    ranged: bool
    ordered: bool
    batches: int
    right: bool
    ends: bool
    wide: bool
    compensated: bool
    unit: int = 1
    new: tuple[int, ...] = NO_NEW.constexprs
    new_pointers: tuple[torch.dtype | None, ...] = NO_NEW.pointers
    strides: Hashable = None


class _Merged(NamedTuple):
    """What a build of the merge is specialised on: heads that share a key head, and Splits."""

    group: int
    pieces: int
    ranges: int
    batches: int


def _arguments(extras: Extras) -> tuple[Any, ...]:
    """``Extras.tensors`` as a launch takes them."""
    if INTERPRETING:
        return tuple(_as_bytes(one) for one in extras.tensors())
    return tuple([None if one is None else one.data_ptr() for one in extras.tensors()])


def _as_bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.dtype != torch.bool else tensor.view(torch.uint8)


def _stand_ins(extras: Extras) -> tuple[Pointer | None, ...]:
    """Pointers of the dtypes of ``Extras.tensors``; a bias has its alignment, the others' reads are of one element each."""

    def stand_in(tensor: torch.Tensor | None) -> Pointer | None:
        if tensor is None:
            return None
        dtype = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
        return Pointer(dtype, tensor.data_ptr() if tensor is extras.bias else 4)

    return tuple(stand_in(one) for one in extras.tensors())


def _constexprs(problem: AttentionProblem, config: Config, variant: _Variant, scale_first: bool, early: bool) -> dict[str, Any]:
    modes = problem.modes
    return {
        "GROUP": variant.group,
        "D": problem.head_dim,
        "DV": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_M": config["block_m"],
        "BLOCK_N": config["block_n"],
        # The compiler counts a load of page numbers as a stage beside that of the keys which they lead to.
        "NUM_STAGES": 2 * config["num_stages"] - 1 if modes.page else config["num_stages"],
        "MIN_TILES": min_tiles(config),
        "ONE_TILE": variant.one_tile,
        "SPLIT": variant.split,
        "RANGED": variant.ranged,
        "ORDERED": variant.ordered,
        "BATCHES": variant.batches,
        "PAGE": modes.page,
        "LEFT": modes.window_left is not None,
        "RIGHT": variant.right,
        "TOPLEFT": problem.mask == "causal-topleft",
        "SOFTCAP": bool(modes.softcap),
        "BIAS": modes.bias,
        "ENDS": variant.ends,
        "ALWAYS": config["block_m"] <= 32,
        "WIDE": variant.wide,
        "UNIT": variant.unit,
        "COMPENSATED": variant.compensated,
        "SCALE_FIRST": scale_first or bool(modes.softcap) or modes.bias in ("alibi", "additive") or modes.fp8_cache,
        "PRECISION": "bf16x6" if problem.dtype == "fp32" else "tf32",
        "INTERPRET": INTERPRETING,
        "EARLY_START": early,
        **dict(zip(("BLOCK_NEW", "HALF", "INTERLEAVED", "MOVING"), variant.new, strict=True)),
    }


def _merge_warps(rows: int, sm_count: int) -> int:
    """Of a program of the merge. One where each row has an SM to itself: no barrier stands between its sums then."""
    return 1 if rows <= sm_count else 4


def _merge_width(width_v: int, warps: int) -> int:
    """Columns of a program of the merge: all of a row, or a few of them by a single warp, which then waits for less."""
    return min(padded_head_dim(width_v), _MERGED_COLUMNS) if warps == 1 else padded_head_dim(width_v)


def _merge_grid(rows: int, width_v: int, warps: int) -> tuple[int, int, int]:
    return rows, cdiv(width_v, _merge_width(width_v, warps)), 1


def _merge_constexprs(of: _Merged, width_v: int, block_n: int, warps: int, early: bool) -> dict[str, Any]:
    block_dv = _merge_width(width_v, warps)
    most, few = (max(1, numbers // block_dv) for numbers in (_MERGED_AT_ONCE, _RANGES_AT_ONCE))
    of_pieces, of_ranges = next_power_of_2(of.pieces), next_power_of_2(of.ranges) if of.ranges else 0
    return {
        "GROUP": of.group,
        "DV": width_v,
        "BLOCK_DV": block_dv,
        "BLOCK_S": min(of_pieces, most),
        "ALL_SPLITS": of_pieces,
        "RANGES_S": min(of_ranges, few),
        "ALL_RANGES": of_ranges,
        "BATCHES": of.batches if of.ranges else 0,
        "BLOCK_N": block_n,
        "EARLY_START": early,
    }


def _right_of(problem: AttentionProblem, seqlen_q: int) -> int | None:
    """How far right of its diagonal a query sees; None for no limit, as that of one query that sees the last key."""
    right = problem.modes.window_right
    if problem.causal:
        right = 0 if right is None else min(right, 0)
    if right is not None and right >= 0 and seqlen_q == 1 and problem.mask != "causal-topleft":
        return None
    return right if right is None else min(right, _FAR)


_Started = tuple[Callable[..., None], tuple[Any, ...]]  # a build's launch, and the constexprs that end its arguments
# Launches the kernels: (q, k, v, out, lse, the partials, the modes' tensors as _arguments has them, those of new keys,
# softmax_scale, softcap, the keys beside those of cache_seqlens, _Sizes.of_keys of the call: guarded copies of a cache may lie
# otherwise than what was bound).
_Launch = Callable[[Any, Any, Any, Any, Any, Any, tuple[Any, ...], tuple[Any, ...], float, float, int, tuple[int, ...]], None]
_NOTHING_NEW = (None,) * 5


class SplitLauncher(Launcher):
    """The kernels with a config, for tensors of any lengths, batch and strides, and the tensors of the modes that it was
    planned for; all else as in the inputs that it was planned for (ops/attention/inputs.py, Launcher). It holds no tensor.

    ``bind`` and a call of it are those of a Launcher, for problems without modes; ``bind_inputs`` is for problems with any.
    """

    serves_class = True

    def __init__(self, inputs: AttentionInputs, config: Config) -> None:
        problem = inputs.problem
        for name, tensor in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
            if tensor.stride(3) != 1 and tensor.shape[3] != 1:
                raise CannotServe(f"{name} has stride {tensor.stride(3)} in its last dimension; it must be 1")
        device = inputs.q.device
        gpu = gpu_of(inputs.q)
        self._problem, self._config, self._on_gpu = problem, config, device.type == "cuda"
        self._sm_count = 4 if gpu is None else gpu.sm_count
        self._early = not INTERPRETING and can_start_early(device)
        self._scale_first, self._write_lse = inputs.softmax_scale <= 0.0, inputs.return_lse
        of_out = Pointer(inputs.q.dtype, 0 if inputs.out is None else inputs.out.data_ptr())
        of_inputs = tuple(Pointer(one.dtype, one.data_ptr()) for one in (inputs.q, inputs.k, inputs.v))
        of_lse = Pointer(torch.float32, 4) if inputs.return_lse else None
        self._pointers = (*of_inputs, of_out, of_lse)
        self._extras = _stand_ins(inputs.extras)
        self._builds: dict[tuple[Any, ...], _Started] = {}  # by _Variant
        self._merges: dict[tuple[_Merged, int], _Started] = {}  # with its warps
        self._merge_builds: dict[tuple[Any, ...], _Started] = {}
        self._launches: Cache[Hashable, tuple[_Launch, int]] = Cache(MOST_CALLS)
        self._block_m, self._block_n, self._ragged = config["block_m"], config["block_n"], problem.modes.lengths != "equal"
        self._right_one, self._right_more = (_right_of(problem, queries) for queries in (1, 2))
        self._uneven = uneven_of(problem) and inputs.extras.cache_seqlens is not None
        left = problem.modes.window_left
        self._left = _FAR if left is None else min(left, _FAR)

    def bind(self, shapes: Shapes, strides: Shapes) -> BoundLaunch:
        """The launch of a problem without modes, for tensors like these but of any number of keys."""
        assert self._problem.modes == PLAIN
        (batch, heads, rows, _), (_, heads_kv, keys, _), _ = shapes
        (qb, qh, qm, _), (kb, kh, kn, _), (vb, vh, vn, _), (ob, oh, om, _) = strides
        strides_kv, others, block_n = (kb, kh, kn, vb, vh, vn), (qb, qh, qm, ob, oh, om), self._block_n
        launches: Cache[tuple[int, bool], tuple[_Launch, int]] = Cache(MOST_CALLS)
        none = (None,) * len(self._extras)
        new = allocator(self._on_gpu)

        def launch_for(keys: int) -> tuple[_Launch, int]:
            return self._bind(_Sizes(batch, heads, heads_kv, rows, keys, rows, (*strides_kv, keys), others), 0)

        launches[-(-keys // KEY_CLASS), keys % block_n == 0] = launch_for(keys)

        def bound(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float
        ) -> None:
            keys = k.shape[2]
            alike = (-(-keys // KEY_CLASS), keys % block_n == 0)
            found = launches.get(alike)
            if found is None:
                found = launches[alike] = launch_for(keys)
            launch, floats = found
            partials = new((floats,), (1,), torch.float32) if floats else None
            of_heads = (argument(q), argument(k), argument(v), argument(out), argument(lse), argument(partials))
            launch(*of_heads, none, _NOTHING_NEW, scale, 0.0, keys, (*strides_kv, keys))

        return bound

    def bind_inputs(self, inputs: AttentionInputs, num_splits: int = 0) -> Callable[[AttentionInputs], AttentionOutput]:
        """The call of inputs of the same shapes, strides and most lengths as these."""
        sizes, plain = _sizes_of(inputs), self._problem.modes == PLAIN
        launch, floats = self._bind(sizes, num_splits)
        results = results_of(inputs, floats)
        none = (None,) * len(self._extras)
        of_keys = sizes.of_keys if inputs.extras.page_table is not None or inputs.extras.cu_seqlens_k is not None else None
        in_cache = inputs.extras.cache_seqlens is not None

        def bound(inputs: AttentionInputs) -> AttentionOutput:
            q, k, v, x = inputs.q, inputs.k, inputs.v, inputs.extras
            out, lse, partials = results(inputs.out)
            of_heads = (argument(q), argument(k), argument(v), argument(out), argument(lse), argument(partials))
            extras, mine = none if plain else _arguments(x), of_keys or _of_keys(k, v)
            before = 0 if in_cache else mine[6]
            launch(*of_heads, extras, _NOTHING_NEW, inputs.softmax_scale, x.softcap, before, mine)
            return AttentionOutput(out, lse)

        return bound

    def bind_cache(self, inputs: AttentionInputs, num_splits: int, append: Append | None) -> CacheLaunch | None:
        """The call of tensors like these, without a look at them; None where their alignment or their number of rows forbids.

        Where ``inputs.extras`` has no lengths of any kind, keys are in a cache and each call says the length of all sequences.
        """
        sizes = _sizes_of(inputs)
        rows = sizes.seqlen_q * sizes.heads // sizes.heads_kv
        if append is not None and not (rows <= self._block_m and 0 < append.k.shape[2] <= _MOST_NEW):
            return None  # a new key is written by one program, which must be the only one that reads it
        if any(one.data_ptr() & 15 for one in (inputs.q, inputs.k, inputs.v, *(() if append is None else append[:2]))):
            return None
        sizes = sizes._replace(of_new=_of_new(append, inputs.k.shape[0]))
        launch, floats = self._bind(sizes, num_splits)
        results = results_of(inputs, floats, tokens_first=True)
        softcap, scale, of_keys, capacity = inputs.extras.softcap, inputs.softmax_scale, sizes.of_keys, sizes.of_keys[6]

        def run(
            tensors: tuple[torch.Tensor | None, ...], length: int, softmax_scale: float | None
        ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
            q, k, v, cu_q, cu_k, seqlens, table, places, leftpad, sinks, slopes, k_scale, v_scale, new_k, new_v, *rotary = [
                None if one is None else address(one) for one in tensors
            ]
            if not INTERPRETING and (q | k | v | (new_k or 0) | (new_v or 0)) & 15:
                return None
            out, lse, partials = results(None)
            launch(
                q, k, v, address(out), argument(lse), argument(partials),
                (cu_q, cu_k, seqlens, table, places, leftpad, sinks, slopes, None, None, k_scale, v_scale),
                (new_k, new_v, *rotary),
                scale if softmax_scale is None else softmax_scale, softcap, min(length, capacity), of_keys,
            )  # fmt: skip
            return out, lse

        return run

    def _splits(self, batch: int, heads_kv: int, rows: int, keys: int, seqlen_q: int, num_splits: int) -> tuple[int, Splits]:
        """Tiles of rows of each key head of a sequence, and into how many pieces their keys are split."""
        config = self._config
        work = work_of(batch * heads_kv, rows, keys, config, span_of(self._problem, seqlen_q, config))
        asked = num_splits or config["num_splits"]
        held, uneven = resident(self._problem, config, work), batch if self._uneven else 1
        return work.tiles_m, splits_for(work, self._block_n, min_tiles(config), asked, self._sm_count, held, uneven)

    def _bind(self, sizes: _Sizes, num_splits: int) -> tuple[_Launch, int]:
        """The launch of tensors of these sizes, and how many numbers its partials are."""
        batch, heads, heads_kv, seqlen_q, keys, stride_lse, of_keys, strides, of_bias, of_table, of_slopes, *rest = sizes
        of_scales, new = rest
        (kb, kh, kn, vb, vh, vn, seqlen_k), (_, qh, qm, _, oh, om) = of_keys, strides
        ends, compensated = self._ragged or seqlen_k % self._block_n != 0, self._write_lse and keys > PLAIN_SUM
        wide = max(qm, om, kn, vn, qh, oh) * max(self._block_m, self._block_n, heads // heads_kv) >= 2**30
        # All that the launch depends on: with a cache that grows it is found again for KEY_CLASS tokens.
        key = (
            num_splits, batch, heads, heads_kv, seqlen_q, rounded_keys(keys), stride_lse, ends, compensated, wide,
            stride_unit((kb, kh, kn, vb, vh, vn, *strides)),
            stride_class((kb, kh, kn, vb, vh, vn, *strides, *of_bias, *new.strides)),
            strides, of_bias, of_table, of_slopes, of_scales, new,
        )  # fmt: skip
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._bind_class(*key, of_keys)
        return launch

    def _bind_class(
        self, num_splits: int, batch: int, heads: int, heads_kv: int, seqlen_q: int, keys: int, stride_lse: int,
        ends: bool, compensated: bool, wide: bool, unit: int, of_strides: Hashable,
        strides: tuple[int, ...], of_bias: tuple[int, ...], of_table: int, of_slopes: int, of_scales: tuple[int, ...],
        new: _OfNew, of_keys: tuple[int, ...],
    ) -> tuple[_Launch, int]:  # fmt: skip
        """``_bind`` of all sizes that are alike; ``of_keys`` are those of one of them."""
        group, all_heads, right = heads // heads_kv, batch * heads_kv, self._right(seqlen_q)
        tiles_m, chosen = self._splits(batch, heads_kv, seqlen_q * group, keys, seqlen_q, num_splits)
        pieces, batches, ordered, ranges, *even = chosen
        programs, rows = all_heads * tiles_m, all_heads * seqlen_q * group
        if max(programs, rows) >= 2**31:
            raise CannotServe(f"it takes {max(programs, rows)} programs; a launch may have {2**31 - 1}")
        kinds = (right is not None, ends, wide, compensated, unit, new.constexprs, new.pointers, of_strides)
        variant = _Variant(group, tiles_m == 1, pieces > 1, ranges > 0, ordered, batches, *kinds)
        all_rows = rows // batch if ranges else rows  # that have places of partials
        numbers = (
            *strides, stride_lse, of_table, of_slopes, *of_bias, *of_scales, *new.strides, heads_kv, seqlen_q, pieces, ranges,
            batch, *even, self._left, _FAR if right is None else right, all_rows, *new.sizes,
        )  # fmt: skip
        start, constexprs = self._builds.get(variant) or self._build(variant, (2, *of_keys, *numbers))
        tail = (*numbers, *constexprs)
        grid = main_grid(chosen, programs, batch)
        if max(pieces, ranges) == 1:
            return partial(_launch_one, start, grid, tail), 0
        warps = _merge_warps(rows, self._sm_count)
        of_merge = _Merged(group, pieces, ranges, batches)
        merge, merge_constexprs = self._merges.get((of_merge, warps)) or self._merge(of_merge, warps)
        places = places_of(chosen, batch)
        merge_tail = (
            *strides[3:], stride_lse, heads_kv, seqlen_q, pieces, places, batch, *even, all_rows, new.sizes[0],
            *merge_constexprs,
        )  # fmt: skip
        floats = partials_of(chosen, batch, rows, self._problem.head_dim_v) // 4
        merge_grid = _merge_grid(rows, self._problem.head_dim_v, warps)
        return partial(_launch_two, start, grid, tail, merge, merge_grid, merge_tail), floats

    def _right(self, seqlen_q: int) -> int | None:
        return self._right_one if seqlen_q == 1 else self._right_more

    def _build(self, variant: _Variant, numbers: tuple[int, ...]) -> _Started:
        config = self._config
        constexprs = tuple(_constexprs(self._problem, config, variant, self._scale_first, self._early).values())
        alignments = (0, 0, 4, 4, 4)  # of new keys and values as of those of the cache; of the others single elements are read
        new = [None if one is None else Pointer(one, at) for one, at in zip(variant.new_pointers, alignments, strict=True)]
        pointers = (*self._pointers, Pointer(torch.float32) if variant.split or variant.ranged else None, *self._extras, *new)
        options = {"num_warps": config["num_warps"], "num_stages": config["num_stages"], "launch_pdl": self._early}
        build = Build(flashmoe_split_triton, (*pointers, 0.5, 0.5, *numbers, *constexprs), **options)
        made = self._builds[variant] = (build.launch, constexprs)
        return made

    def _merge(self, of: _Merged, warps: int) -> _Started:
        constexprs = _merge_constexprs(of, self._problem.head_dim_v, self._block_n, warps, self._early)
        values = tuple(constexprs.values())
        made = self._merge_builds.get((warps, *values))
        if made is None:
            _, _, _, out, lse = self._pointers
            cu_seqlens_q, cache_seqlens, leftpads, sinks = (self._extras[at] for at in (0, 2, 5, 6))
            numbers = [*[2] * 11, 0.5, 0.5, 2, 2]
            arguments = (Pointer(torch.float32), out, lse, sinks, cu_seqlens_q, cache_seqlens, leftpads, *numbers, *values)
            build = Build(flashmoe_merge_triton, arguments, num_warps=warps, launch_pdl=self._early)
            made = self._merge_builds[warps, *values] = (build.launch, values)
        self._merges[of, warps] = made
        return made


def _launch_one(
    start: Callable[..., None], grid: tuple[int, int, int], tail: tuple[Any, ...],
    q: Any, k: Any, v: Any, out: Any, lse: Any, partials: Any, extras: tuple[Any, ...], new: tuple[Any, ...], scale: float,
    softcap: float, before: int, of_keys: tuple[int, ...],
) -> None:  # fmt: skip
    start(grid, q, k, v, out, lse, None, *extras, *new, scale, softcap, before, *of_keys, *tail)


def _launch_two(
    start: Callable[..., None], grid: tuple[int, int, int], tail: tuple[Any, ...],
    merge: Callable[..., None], merge_grid: tuple[int, int, int], merge_tail: tuple[Any, ...],
    q: Any, k: Any, v: Any, out: Any, lse: Any, partials: Any, extras: tuple[Any, ...], new: tuple[Any, ...], scale: float,
    softcap: float, before: int, of_keys: tuple[int, ...],
) -> None:  # fmt: skip
    start(grid, q, k, v, out, lse, partials, *extras, *new, scale, softcap, before, *of_keys, *tail)
    merge(merge_grid, partials, out, lse, extras[6], extras[0], extras[2], extras[5], before, of_keys[6], *merge_tail)


def _of_new(append: Append | None, caches: int) -> _OfNew:
    if append is None:
        return NO_NEW
    k, v, cos, sin, rotary_seqlens, interleaved, moving = append
    rows = k.shape[2]
    positions, half, stride_cos = (0, 0, 0) if cos is None else (*cos.shape, cos.stride(0))
    return _OfNew(
        (*k.stride()[:3], *v.stride()[:3]),
        (rows, caches, positions, stride_cos),
        (next_power_of_2(rows), half, interleaved, moving),
        tuple([None if one is None else one.dtype for one in (k, v, cos, sin, rotary_seqlens)]),
    )


def _of_keys(k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    """Strides of K and V and the keys that they have room for."""
    (kb, kh, kn, _), (vb, vh, vn, _) = k.stride(), v.stride()
    return (kb, kh, kn, vb, vh, vn, k.shape[2])


def _sizes_of(inputs: AttentionInputs) -> _Sizes:
    q, k, v, x, out = inputs.q, inputs.k, inputs.v, inputs.extras, inputs.out
    (batch, heads, rows, _), (_, heads_kv, keys, _) = q.shape, k.shape
    qb, qh, qm, _ = q.stride()
    ob, oh, om, _ = shapes_of_results(inputs)[1] if out is None else out.stride()
    of_keys, seqlen_q = _of_keys(k, v), rows
    if x.cu_seqlens_q is not None:
        batch, seqlen_q, qb, ob = x.cu_seqlens_q.shape[0] - 1, x.max_seqlen_q, 0, 0
    if x.page_table is not None:
        keys = x.page_table.shape[1] * inputs.problem.modes.page
        of_keys = (*of_keys[:6], keys)
    elif x.cu_seqlens_k is not None:
        _, kh, kn, _, vh, vn, _ = of_keys
        keys = x.max_seqlen_k
        of_keys = (0, kh, kn, 0, vh, vn, keys)
    of_k_scale, of_v_scale = ((0, 0) if one is None else one.stride() for one in (x.k_scale, x.v_scale))
    return _Sizes(
        batch, heads, heads_kv, seqlen_q, min(keys, x.max_seqlen_k or keys), rows, of_keys, (qb, qh, qm, ob, oh, om),
        _NO_BIAS if x.bias is None else x.bias.stride(),
        0 if x.page_table is None else x.page_table.stride(0),
        0 if x.alibi_slopes is None else x.alibi_slopes.stride(0),
        (*of_k_scale, *of_v_scale),
    )  # fmt: skip


def shapes_of_results(inputs: AttentionInputs) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the output, and the shape of the log-sum-exp: [batch, heads, seqlen_q], and [heads, total_q] of
    packed queries, as FlashAttention-3 gives it."""
    q, width = inputs.q, inputs.problem.head_dim_v
    batch, heads, rows, _ = q.shape
    if inputs.extras.cu_seqlens_q is not None:
        return (1, heads, rows, width), (rows * heads * width, width, heads * width, 1), (heads, rows)
    return (batch, heads, rows, width), strides_like(q.shape, q.stride(), width), (batch, heads, rows)


def results_of(
    inputs: AttentionInputs, floats: int, tokens_first: bool = False
) -> Callable[[torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
    """allocate(out) for inputs like these: ``out``, or a new output where it is None, whose tokens come before its heads if so
    asked; the log-sum-exp if they ask for it; and ``floats`` numbers of partials if there are any."""
    shape, of_out, of_lse = shapes_of_results(inputs)
    strides_lse, packed = (of_lse[-2] * of_lse[-1], of_lse[-1], 1)[-len(of_lse) :], len(of_lse) == 2
    if tokens_first:
        (batch, heads, rows, width), (ob, oh, om, _) = shape, of_out
        # Packed queries have no dimension of sequences.
        shape, of_out = (batch, rows, heads, width)[packed:], (ob, om, oh, 1)[packed:]
    new, dtype, write_lse = allocator(inputs.q.device.type == "cuda"), inputs.q.dtype, inputs.return_lse

    def allocate(out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if out is None:
            out = new(shape, of_out, dtype)
        lse = new(of_lse, strides_lse, torch.float32) if write_lse else None
        return out, lse, new((floats,), (1,), torch.float32) if floats else None

    return allocate


# What is promised -----------------------------------------------------------------------------------------------------------

def plan(inputs: AttentionInputs, config: Config) -> SplitLauncher:
    return SplitLauncher(inputs, config)


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    return SplitLauncher(inputs, config).bind_inputs(inputs)(inputs)


def _grid(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[tuple[int, int, int], int, Work, Splits]:
    """The grid of the main kernel and the rows of the merge, of a problem as its text says it."""
    work, chosen = splits_in(problem, config, gpu.sm_count)
    grid = main_grid(chosen, work.heads * work.tiles_m, problem.batch)
    return grid, problem.batch * problem.heads * problem.seqlen_q, work, chosen


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    grid, rows, _, chosen = _grid(problem, config, gpu)
    main = Launch(f"^{flashmoe_split_triton.__name__}$", grid, 32 * config["num_warps"])
    warps = _merge_warps(rows, gpu.sm_count)
    merge = Launch(f"^{flashmoe_merge_triton.__name__}$", _merge_grid(rows, problem.head_dim_v, warps), 32 * warps)
    return (main, merge) if chosen.pieces > 1 or chosen.ranges else (main,)


_PRESENT = {  # of compile_job: pointers of the modes and their types
    "cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32", "cache_seqlens": "*i32", "page_table": "*i32", "cache_batch_idx": "*i32",
    "leftpads": "*i32", "slopes": "*fp32", "prefixes": "*i32", "k_scales": "*fp32", "v_scales": "*fp32",
}  # fmt: skip


def _pointer_types(problem: AttentionProblem) -> dict[str, str | None]:
    """The type of each pointer of a problem's call, None for one that is not given."""
    modes = problem.modes
    cached = modes.lengths == "ragged" or modes.page > 0
    given = {
        "cu_seqlens_q": modes.lengths == "packed", "cu_seqlens_k": modes.lengths == "packed" and not cached,
        "cache_seqlens": cached, "page_table": modes.page > 0, "cache_batch_idx": False, "leftpads": modes.leftpad,
        "slopes": modes.bias == "alibi", "prefixes": modes.prefix > 0,
        "k_scales": modes.fp8_cache, "v_scales": modes.fp8_cache,
    }  # fmt: skip
    types = {name: _PRESENT[name] if there else None for name, there in given.items()}
    biases = {"boolean": "*u8", "additive": f"*{problem.dtype}"}
    types |= dict.fromkeys(("new_ks", "new_vs", "cos", "sin", "rotary_seqlens"))
    return types | {"sinks": "*fp32" if modes.sinks else None, "bias": biases.get(modes.bias)}


def compile_job(problem: AttentionProblem, config: Config, gpu: Gpu) -> CompileJob:
    """Of the main kernel; the merge is a few loads."""
    _, _, work, chosen = _grid(problem, config, gpu)
    split = chosen.pieces > 1
    ends = problem.modes.lengths != "equal" or problem.seqlen_k % config["block_n"] != 0
    right = _right_of(problem, problem.seqlen_q) is not None
    compensated = problem.seqlen_k > PLAIN_SUM
    merged = split or chosen.ranges > 0
    widths = (problem.head_dim, problem.head_dim_v)  # powers of two of the strides too, in memory as models lay it out
    group, kinds = problem.heads // problem.heads_kv, (split, chosen.ranges > 0, chosen.ordered, chosen.batches)
    variant = _Variant(group, work.tiles_m == 1, *kinds, right, ends, False, compensated, stride_unit(widths))
    constexprs = _constexprs(problem, config, variant, scale_first=False, early=gpu.compute_capability >= (9, 0))
    kind = "*fp8e4nv" if problem.modes.fp8_cache else f"*{problem.dtype}"
    types = {"q_base": f"*{problem.dtype}", "k_base": kind, "v_base": kind, "out_base": f"*{problem.dtype}"}
    pointers = types | {"lse_base": "*fp32"} | {"partials": "*fp32" if merged else None} | _pointer_types(problem)
    absent = {name: None for name, one in pointers.items() if one is None}
    signature = dict.fromkeys(flashmoe_split_triton.arg_names, "i32") | {"softmax_scale": "fp32", "softcap": "fp32"}
    signature |= {name: one for name, one in pointers.items() if one is not None}
    signature |= {"even_slope": "fp32", "even_least": "fp32"}
    signature |= dict.fromkeys((*constexprs, *absent), "constexpr")
    main = tuple(name for name in signature if name in _STRIDES)
    aligned = main if (problem.head_dim | problem.head_dim_v) % 16 == 0 else ()
    return CompileJob(
        function=flashmoe_split_triton,
        signature=signature,
        constexprs=constexprs | absent,
        divisible_by_16=("q_base", "k_base", "v_base", "out_base", *(("partials",) if merged else ()), *aligned),
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
        threads=32 * config["num_warps"],
    )


KERNEL = AttentionKernel(
    name=NAME,
    origin="ours",
    op="attention",
    about="portable Triton for serving: packed query heads, keys split over programs, caches, windows, masks",
    supports=supports,
    configs=configs,
    run=run,
    launches=launches,
    plan=plan,
    workspace=workspace,
    compile_job=compile_job,
    suits=suits,
    interpretable=True,
)
