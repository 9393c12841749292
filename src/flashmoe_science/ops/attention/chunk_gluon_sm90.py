"""Attention of few queries to many keys for Hopper in Gluon: packed query heads, keys split over programs, TMA and wgmma.

Shapes: Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv] -> O [B, H, Sq, Dv], LSE [B, H, Sq]; or a cache of keys and values,
contiguous or in pages, with its lengths on the device; or packed queries (ops/attention/modes.py); with a window, a soft cap
and sinks. fp16 and bf16, D and Dv multiples of 8 up to 256. Compute capability 9.0 only.

A consumer warpgroup has 64 rows: ``BLOCK_G`` of the query heads that share a key head, times 64 / ``BLOCK_G`` queries, one copy
of the copy engine, which fills heads that are not there with zeros. A program is one or two consumers and a producer warp, as
in fwd_gluon_sm90.py, for one tile of queries and a contiguous piece of the keys that the tile sees. Where keys are split, it
leaves its running maximum, its sum and its unscaled output in fp32, which chunk_merge.py adds in the order of the splits: equal
calls give equal bits.

Keys go from the last tile to the first. The diagonal crosses the last few alone, which are unrolled: the loop has no mask. With
a window on the left the first few are crossed too: the loop branches around a mask then.

Of a paged cache a tile of keys is a part of a page, or several pages, each by a copy of its own; all complete one barrier.

Splitting the keys: Dao et al. 2023 (Flash-Decoding). Warp specialisation: Shah et al. 2024 (FlashAttention-3).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe, CompileJob, Config, Launch
from flashmoe_science.ops.attention import chunk_merge
from flashmoe_science.ops.attention.append_fallback import Append
from flashmoe_science.ops.attention.chunk_launch import (
    configs,
    heads_of,
    min_tiles,
    queries_of,
    span_of,
    splits_for,
    suits,
    supports,
    threads,
    work_in,
    work_of,
    workspace,
)
from flashmoe_science.ops.attention.copies import (
    Parts,
    are_aligned,
    check_copied,
    copied_strides,
    described,
    descriptor_types,
    encoders_of,
    rows_of_copy,
    value_parts,
)
from flashmoe_science.ops.attention.fwd_launch import (
    PAGES_REGISTERS,
    PRODUCER_REGISTERS,
    consumer_registers,
    registers,
)
from flashmoe_science.ops.attention.hopper_gluon import (
    LAZY_ABOVE,
    as_matrix,
    capped,
    columns_before,
    load_tile,
    log2_of_sum,
    memory_of,
    memory_of_keys,
    no_output,
    own_sums,
    pages_of_tile,
    parts_of,
    rescale_rows,
    scale_rows,
    softmax_step,
    start_output,
    wait_for_output,
    with_sink,
)
from flashmoe_science.ops.attention.inputs import (
    AttentionInputs,
    AttentionKernel,
    AttentionOutput,
    BoundLaunch,
    Launcher,
    Shapes,
)
from flashmoe_science.ops.attention.modes import Extras
from flashmoe_science.ops.attention.problem import AttentionProblem, head_parts
from flashmoe_science.ops.attention.split_launch import MOST_ORDERED, partial_bytes
from flashmoe_science.ops.attention.split_triton import CacheLaunch, results_of, shapes_of_results
from flashmoe_science.ops.descriptors import Tile, template
from flashmoe_science.ops.gluon_bridge import barrier, tma_load
from flashmoe_science.ops.launch import (
    Build,
    Grid,
    Pointer,
    allocator,
    argument,
    can_start_early,
    cdiv,
    next_power_of_2,
    stride_class,
)
from flashmoe_science.ops.pipeline_gluon import advance, first_stage

NAME = "chunk_gluon_sm90"
# Not specialised on: a new batch or length must not compile anew.
_LAST_SIZES = ("stride_lse", "heads_kv", "seqlen_q", "seqlen_k", "splits", "all_rows", "stride_table", "batches")
SIZES = ("left", "right", *_LAST_SIZES)
ROWS = gl.constexpr(64)  # of a consumer: the M of a warpgroup's matrix instruction


@gluon.jit
def _sequence(lengths, batch, seqlen_q, seqlen_k):
    """Of a sequence: its first row of packed queries, its queries, its row of the cache, its first row of packed keys, its
    keys."""
    cu_seqlens_q, cu_seqlens_k, cache_seqlens, cache_batch_idx = lengths
    row_q = batch
    row_k = batch
    first_q = gl.to_tensor(0)
    first_k = gl.to_tensor(0)
    if cu_seqlens_q is not None:
        row_q = gl.to_tensor(0)
        first_q = gl.load(cu_seqlens_q + batch)
        seqlen_q = gl.load(cu_seqlens_q + batch + 1) - first_q
    if cu_seqlens_k is not None:
        row_k = gl.to_tensor(0)
        first_k = gl.load(cu_seqlens_k + batch)
        packed = gl.load(cu_seqlens_k + batch + 1) - first_k
        if cache_seqlens is None:
            seqlen_k = packed
        else:
            seqlen_k = gl.minimum(gl.load(cache_seqlens + batch), packed)
    elif cache_seqlens is not None:
        seqlen_k = gl.minimum(gl.load(cache_seqlens + batch), seqlen_k)  # never past the capacity
    if cache_batch_idx is not None:
        row_k = gl.load(cache_batch_idx + batch)
    return row_q, first_q, seqlen_q, row_k, first_k, seqlen_k


@gluon.jit
def _longest(lengths, place, batches, BATCHES: gl.constexpr):
    """The sequence at a place, from 0 on, among ``batches`` in the order of their keys, the most first and equal ones as they
    come; there are BATCHES of them at the most. Numbers of keys may be negative: what is past the sequences comes after all."""
    cu_seqlens_q, cu_seqlens_k, cache_seqlens, cache_batch_idx = lengths
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, BATCHES, gl.SliceLayout(1, layout))
    column = gl.arange(0, BATCHES, gl.SliceLayout(0, layout))
    if cache_seqlens is not None:
        own = gl.load(cache_seqlens + row, mask=row < batches, other=-2147483648)
        others = gl.load(cache_seqlens + column, mask=column < batches, other=-2147483648)
    else:
        end = gl.load(cu_seqlens_k + row + 1, mask=row < batches, other=-2147483648)
        own = end - gl.load(cu_seqlens_k + row, mask=row < batches, other=0)
        end = gl.load(cu_seqlens_k + column + 1, mask=column < batches, other=-2147483648)
        others = end - gl.load(cu_seqlens_k + column, mask=column < batches, other=0)
    own, others = gl.expand_dims(own, 1), gl.expand_dims(others, 0)
    before = (others > own) | ((others == own) & (gl.expand_dims(column, 0) < gl.expand_dims(row, 1)))
    places = gl.sum(before.to(gl.int32), 1)
    return gl.sum(gl.where(places == place, row, 0), 0)


@gluon.jit
def _load_queries(descs, batch, head_kv, head, query, full, smem, slot):
    """Start the copies of a consumer's rows; ``full`` completes with the last of them."""
    if len(descs) == 1:
        mbarrier.expect(full, descs[0].block_type.nbytes)
    else:
        mbarrier.expect(full, descs[0].block_type.nbytes + descs[1].block_type.nbytes)
    tma_load(descs[0], [batch, head_kv, head, query, 0], full, smem[0].index(slot))
    if len(descs) == 2:
        tma_load(descs[1], [batch, head_kv, head, query, descs[0].block_type.shape[4]], full, smem[1].index(slot))


@gluon.jit
def _first_key(tile, low, first_k, BLOCK_N: gl.constexpr):
    """The row of K and V where a tile begins; of one before ``low``, which pads an unrolled few, past every row: zeros."""
    return gl.where(tile < low, 1 << 30, first_k + tile * BLOCK_N)


@gluon.jit
def _load_pages(descs, pages, head, tile, full, smem, stage, PAGE: gl.constexpr):
    """Start the copies of all rows and parts of a tile from their pages; ``full`` completes with the last of them."""
    BLOCK_N: gl.constexpr = smem[0].shape[3]
    ROWS_: gl.constexpr = descs[0].block_type.shape[2]
    SECOND: gl.constexpr = descs[0].block_type.shape[3]  # the first column of the second part
    row = tile * BLOCK_N % PAGE if PAGE > BLOCK_N else 0
    if len(descs) == 1:
        mbarrier.expect(full, descs[0].block_type.nbytes * (BLOCK_N // ROWS_))
    else:
        mbarrier.expect(full, (descs[0].block_type.nbytes + descs[1].block_type.nbytes) * (BLOCK_N // ROWS_))
    for n in gl.static_range(BLOCK_N // ROWS_):
        tma_load(descs[0], [pages[n], head, row, 0], full, smem[0].index(stage).slice(n * ROWS_, ROWS_, 2))
        if len(descs) == 2:
            tma_load(descs[1], [pages[n], head, row, SECOND], full, smem[1].index(stage).slice(n * ROWS_, ROWS_, 2))


@gluon.jit
def _load_keys(descs, keys, head, tile, low, empty, full, smem, stage, phase, PAGE: gl.constexpr):
    """Start the copies of a tile of K or V to a stage once it is free. ``keys``: row of the cache and first row; with pages the
    sequence's row of the table and how many it has."""
    BLOCK_N: gl.constexpr = smem[0].shape[3]
    if PAGE == 0:
        mbarrier.wait(empty.index(stage), phase ^ 1)
        row = _first_key(tile, low, keys[1], BLOCK_N)
        load_tile(descs, (keys[0], head), row, full.index(stage), smem, stage)
    else:  # the table is read before the wait, which hides how long that takes
        pages = pages_of_tile(keys[0], keys[1], _first_key(tile, low, 0, BLOCK_N), BLOCK_N, PAGE)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        _load_pages(descs, pages, head, tile, full.index(stage), smem, stage, PAGE)


@gluon.jit
def _produce(descs, memory, barriers, place, CONSUMERS: gl.constexpr, QUERIES: gl.constexpr, PAGE: gl.constexpr):
    """The producer: one warp that issues every copy from device memory."""
    q_descs, k_descs, v_descs = descs
    q_smem, k_smem, v_smem = memory
    q_full, k_full, k_empty, v_full, v_empty = barriers
    row_q, head_kv, first_head, first_row, keys, low, high, count = place
    STAGES_K: gl.constexpr = k_smem[0].shape[0]
    STAGES_V: gl.constexpr = v_smem[0].shape[0]
    stage_k, phase_k = first_stage()
    stage_v, phase_v = first_stage()
    if count > 0:
        for consumer in gl.static_range(CONSUMERS):
            row = first_row + consumer * QUERIES
            _load_queries(q_descs, row_q, head_kv, first_head, row, q_full.index(consumer), q_smem, consumer)
        # In the order in which consumers ask: K of a tile before V of the tile before it.
        for i in range(count + 1):
            if i < count:
                _load_keys(k_descs, keys, head_kv, high - 1 - i, low, k_empty, k_full, k_smem, stage_k, phase_k, PAGE)
                stage_k, phase_k = advance(stage_k, phase_k, STAGES_K)
            if i > 0:
                _load_keys(v_descs, keys, head_kv, high - i, low, v_empty, v_full, v_smem, stage_v, phase_v, PAGE)
                stage_v, phase_v = advance(stage_v, phase_v, STAGES_V)


@gluon.jit
def _query_tiles(smem, slot):
    """A consumer's rows of each part of Q, as matrices."""
    ROWS_: gl.constexpr = smem[0].shape[3] * smem[0].shape[4]
    first = smem[0].index(slot).reshape([ROWS_, smem[0].shape[5]])
    if len(smem) == 2:
        return first, smem[1].index(slot).reshape([ROWS_, smem[1].shape[5]])
    else:
        return (first,)


@gluon.jit
def _start_scores(q, k_smem, stage):
    """Start S = Q K^T: an accumulator in flight, of as many products as there are parts."""
    BLOCK_N: gl.constexpr = k_smem[0].shape[3]
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    s = warpgroup_mma(q[0], as_matrix(k_smem[0], stage).permute((1, 0)), s, use_acc=False, is_async=True)
    if len(k_smem) == 2:
        s = warpgroup_mma(q[1], as_matrix(k_smem[1], stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _mask(s, tile, low, limit):
    """-inf where a key is not before its row's ``limit``, or is of a tile before ``low``."""
    limit = gl.where(tile < low, 0, limit - tile * s.shape[1])
    return gl.where(columns_before(s, gl.expand_dims(limit, 1)), s, float("-inf"))


@gluon.jit
def _behind(left, right):
    """Keys that a query sees before its last one: ``right`` of them after the key at its own place, unless None are."""
    if right is None:
        return left
    else:
        return left + right


@gluon.jit
def _limits(limit, first_query, span, QUERIES: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Of a consumer's rows: where they end to see keys, alone where no window is on the left. Else where each begins, where it
    ends, and the tiles of keys that all of them see: from the one to before the other."""
    low, high, count, first_head, first_row, seqlen_q, seqlen_k, diagonal, left, right = span
    if left is None:
        return (limit,)
    else:
        to_first = diagonal - _behind(left, right)
        first = first_query + gl.arange(0, ROWS, limit.type.layout) % QUERIES + to_first
        last_query = gl.minimum(first_query + QUERIES, seqlen_q) - 1
        begin = (gl.maximum(last_query + to_first, 0) + BLOCK_N - 1) // BLOCK_N
        end = seqlen_k
        if CAUSAL:
            end = gl.maximum(gl.minimum(first_query + diagonal + 1, seqlen_k), 0)
        return first, limit, begin, end // BLOCK_N


@gluon.jit
def _mask_window(s, tile, first, limit):
    """-inf where a key is before its row's ``first`` or not before its ``limit``."""
    first, limit = gl.expand_dims(first - tile * s.shape[1], 1), gl.expand_dims(limit - tile * s.shape[1], 1)
    return gl.where(columns_before(s, limit) & (columns_before(s, first) == 0), s, float("-inf"))


@gluon.jit
def _zero_part_after(tile, rows, BLOCK_N: gl.constexpr):
    PIECE: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for first in gl.static_range(0, BLOCK_N, PIECE):
        if rows < first + PIECE:
            piece = tile.slice(first, PIECE, 0)
            row = gl.expand_dims(first + gl.arange(0, PIECE, gl.SliceLayout(1, layout)), 1)
            values = piece.load(layout)
            piece.store(gl.where(row < rows, values, gl.zeros_like(values)))


@gluon.jit
def _zero_after(v_smem, stage, rows):
    """Make the rows of a tile of V from ``rows`` on zeros: a cache may hold NaN past a sequence's length, and 0 * NaN is NaN.

    Consumers do so each, with the same values.
    """
    _zero_part_after(as_matrix(v_smem[0], stage), rows, v_smem[0].shape[3])
    if len(v_smem) == 2:
        _zero_part_after(as_matrix(v_smem[1], stage), rows, v_smem[1].shape[3])
    fence_async_shared()
    barrier()


@gluon.jit
def _step(
    tile, q, memory, barriers, scales, low, limits, state, rings,
    MASKED: gl.constexpr, COMPENSATED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """S of a tile of keys beside P V of the one before, and the softmax of S beside P V. See fwd_gluon_sm90.py, ``_step``, for
    the wait on a barrier that has long completed."""
    p, o, row_max, row_sum, lost = state
    stage_k, phase_k, stage_v, phase_v = rings
    q_smem, k_smem, v_smem = memory
    q_full, k_full, k_empty, v_full, v_empty = barriers
    LAZY: gl.constexpr = SPLIT and (len(o) == 2 or o[0].shape[1] > LAZY_ABOVE)  # as measured: 11 to 15% slower without splits
    mbarrier.wait(k_full.index(stage_k), phase_k)
    s_token = _start_scores(q, k_smem, stage_k)
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o_tokens = start_output(p, o, v_smem, stage_v)
    s = warpgroup_mma_wait(len(o), [s_token])
    mbarrier.arrive(k_empty.index(stage_k))
    stage_k, phase_k = advance(stage_k, phase_k, k_smem[0].shape[0])
    if scales[1] is not None:
        s = capped(s, scales[1])
    if len(limits) == 4:
        if (tile < limits[2]) | (tile >= limits[3]):
            s = _mask_window(s, tile, limits[0], limits[1])
    elif MASKED:
        s = _mask(s, tile, low, limits[0])
    p32, row_max, rescale = softmax_step(s, row_max, scales[0], MASKED, LAZY)
    shrink = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout)), 1)
    before = row_sum * shrink
    more = gl.convert_layout(own_sums(p32), row_sum.type.layout)
    if COMPENSATED:  # for what rounding takes (Kahan 1965)
        more -= lost * shrink
    row_sum = before + more
    if COMPENSATED:
        lost = (row_sum - before) - more
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o = wait_for_output(o_tokens)
    mbarrier.arrive(v_empty.index(stage_v))
    stage_v, phase_v = advance(stage_v, phase_v, v_smem[0].shape[0])
    o = rescale_rows(o, rescale, LAZY)
    p = gl.convert_layout(p32.to(v_smem[0].dtype), gl.DotOperandLayout(0, o[0].type.layout, 2))
    return (p, o, row_max, row_sum, lost), (stage_k, phase_k, stage_v, phase_v)


@gluon.jit
def _store_part(base, offsets, row_ok, o, first, DV: gl.constexpr):
    """Write a part of O, whose first column is ``first``, to ``base + offsets``."""
    layout: gl.constexpr = o.type.layout
    dims = gl.expand_dims(first + gl.arange(0, o.shape[1], gl.SliceLayout(0, layout)), 0)
    rows = gl.expand_dims(gl.convert_layout(offsets, gl.SliceLayout(1, layout)), 1)
    inside = gl.expand_dims(gl.convert_layout(row_ok, gl.SliceLayout(1, layout)), 1) & (dims < DV)
    gl.store(base + rows + dims, o.to(base.dtype.element_ty), mask=inside)


@gluon.jit
def _store_rows(base, offsets, row_ok, o, DV: gl.constexpr):
    """Write each part of O to ``base + offsets``."""
    _store_part(base, offsets, row_ok, o[0], 0, DV)
    if len(o) == 2:
        _store_part(base, offsets, row_ok, o[1], o[0].shape[1], DV)


@gluon.jit
def _write(
    output, span, o, row_max, row_sum,
    CONSUMER: gl.constexpr, QUERIES: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr, SPLIT: gl.constexpr,
    SEEN: gl.constexpr,
):  # fmt: skip
    """Write the partials of a consumer's rows, or where keys are not split the output. ``SEEN``: there were keys."""
    low, high, count, first_head, first_row, seqlen_q, seqlen_k, diagonal, left, right = span
    out_base, lse_base, partials, sinks, out_at, lse_at, part_at, sums_at, stride_oh, stride_om, stride_lse, splits = output
    row = gl.arange(0, ROWS, row_max.type.layout)
    query = CONSUMER * QUERIES + row % QUERIES  # of the program's
    head = (first_head + row // QUERIES).to(gl.int64)
    row_ok = (first_row + query < seqlen_q) & (head < GROUP)
    if SPLIT:
        packed = query * GROUP + head
        if SEEN:  # of a piece without keys the merge reads no more than its sum of 0
            _store_rows(partials + part_at, packed * splits * DV, row_ok, o, DV)
        sums = partials + sums_at + packed * splits * 2
        gl.store(sums, row_max, mask=row_ok)
        gl.store(sums + 1, row_sum, mask=row_ok)
    else:
        # A row that sees no key has a sum of 0: its output is 0 and its log-sum-exp log(0) = -inf.
        if sinks is None:
            o = scale_rows(o, 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum))
        else:
            row_max, row_sum, shrink = with_sink(gl.load(sinks + head, mask=row_ok, other=0.0), row_max, row_sum)
            o = scale_rows(o, shrink / gl.where(row_sum == 0.0, 1.0, row_sum))
        _store_rows(out_base + out_at, query.to(gl.int64) * stride_om + head * stride_oh, row_ok, o, DV)
        if lse_base is not None:
            shift = gl.where(row_max == float("-inf"), 0.0, row_max)
            lse = (shift + log2_of_sum(row_sum)) * 0.6931471805599453
            gl.store(lse_base + lse_at + head * stride_lse + query, lse, mask=row_ok)


@gluon.jit
def _consume(
    memory, barriers, span, output, scales,
    CONSUMER: gl.constexpr, QUERIES: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr, PEELED: gl.constexpr,
    CAUSAL: gl.constexpr, SPLIT: gl.constexpr, ZEROED: gl.constexpr, COMPENSATED: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 rows of the program's tile of queries."""
    q_smem, k_smem, v_smem = memory
    q_full, k_full, k_empty, v_full, v_empty = barriers
    low, high, count, first_head, first_row, seqlen_q, seqlen_k, diagonal, left, right = span
    BLOCK_N: gl.constexpr = k_smem[0].shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, v_smem[0].shape[4], 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)

    if count > 0:
        limit = gl.full([ROWS], 0, gl.int32, row_layout) + seqlen_k
        if CAUSAL:
            query = first_row + CONSUMER * QUERIES + gl.arange(0, ROWS, row_layout) % QUERIES
            limit = gl.minimum(query + diagonal + 1, limit)
        limits = _limits(limit, first_row + CONSUMER * QUERIES, span, QUERIES, BLOCK_N, CAUSAL)
        stage_k, phase_k = first_stage()
        stage_v, phase_v = first_stage()

        # The first tile, alone.
        q = _query_tiles(q_smem, CONSUMER)
        mbarrier.wait(q_full.index(CONSUMER), 0)
        mbarrier.wait(k_full.index(stage_k), phase_k)
        s = warpgroup_mma_wait(0, [_start_scores(q, k_smem, stage_k)])
        mbarrier.arrive(k_empty.index(stage_k))
        stage_k, phase_k = advance(stage_k, phase_k, k_smem[0].shape[0])
        if scales[1] is not None:
            s = capped(s, scales[1])
        if left is None:
            s = _mask(s, high - 1, low, limit)
        else:
            s = _mask_window(s, high - 1, limits[0], limit)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        p32, row_max, unused = softmax_step(s, row_max, scales[0], True, False)
        row_sum = own_sums(p32)
        lost = gl.zeros_like(row_sum)
        p = gl.convert_layout(p32.to(v_smem[0].dtype), gl.DotOperandLayout(0, o_layout, 2))
        o = no_output(v_smem, ROWS)
        if ZEROED:
            mbarrier.wait(v_full.index(stage_v), phase_v)
            if high * BLOCK_N > seqlen_k:
                _zero_after(v_smem, stage_v, seqlen_k - (high - 1) * BLOCK_N)
        else:  # it has long completed: a branch across which the assembler moves no part of the second tile, which would spill
            mbarrier.wait(q_full.index(CONSUMER), 0)

        # The others: those that the diagonal may cross, then plain.
        state, rings = (p, o, row_max, row_sum, lost), (stage_k, phase_k, stage_v, phase_v)
        for i in gl.static_range(1, PEELED):
            state, rings = _step(
                high - 1 - i, q, memory, barriers, scales, low, limits, state, rings, True, COMPENSATED, SPLIT
            )  # fmt: skip
        for i in range(PEELED, count):
            state, rings = _step(
                high - 1 - i, q, memory, barriers, scales, low, limits, state, rings, left is not None, COMPENSATED, SPLIT
            )  # fmt: skip
        p, o, row_max, row_sum, lost = state
        stage_k, phase_k, stage_v, phase_v = rings
        mbarrier.wait(v_full.index(stage_v), phase_v)
        o = wait_for_output(start_output(p, o, v_smem, stage_v))
        if scales[1] is not None:
            row_max += 0.5 * scales[0]  # what ``capped`` leaves out
        total = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
        _write(output, span, o, row_max, total, CONSUMER, QUERIES, GROUP, DV, SPLIT, True)
    else:
        none = gl.zeros([ROWS], gl.float32, row_layout)
        _write(output, span, no_output(v_smem, ROWS), none + float("-inf"), none, CONSUMER, QUERIES, GROUP, DV, SPLIT, False)


@gluon.jit(do_not_specialize=SIZES)
def flashmoe_chunk_gluon_sm90(
    q_desc, k_desc, v_desc, q_rest, k_rest, v_rest, out_base, lse_base, partials,
    cu_seqlens_q, cu_seqlens_k, cache_seqlens, cache_batch_idx, page_table, sinks, softmax_scale, softcap, left, right,
    stride_ob, stride_oh, stride_om, stride_lse, heads_kv, seqlen_q, seqlen_k, splits, all_rows, stride_table, batches,
    GROUP: gl.constexpr, DV: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES_K: gl.constexpr, STAGES_V: gl.constexpr, MIN_TILES: gl.constexpr, PEELED: gl.constexpr,
    CAUSAL: gl.constexpr, TOPLEFT: gl.constexpr, SPLIT: gl.constexpr, COMPENSATED: gl.constexpr, PAGE: gl.constexpr,
    BATCHES: gl.constexpr, EARLY_START: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    q_descs, k_descs, v_descs = parts_of(q_desc, q_rest), parts_of(k_desc, k_rest), parts_of(v_desc, v_rest)
    BLOCK_G: gl.constexpr = q_desc.block_type.shape[2]
    QUERIES: gl.constexpr = q_desc.block_type.shape[3]  # of a consumer
    HEAD_TILES: gl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    # Where no cache is, nothing but zeros follows the last key. Without the branch a causal build spills 112 bytes a thread.
    ZEROED: gl.constexpr = CAUSAL or cache_seqlens is not None or cu_seqlens_k is not None
    q_smem = memory_of(q_descs, CONSUMERS)
    k_smem = memory_of_keys(k_descs, STAGES_K, BLOCK_N)
    v_smem = memory_of_keys(v_descs, STAGES_V, BLOCK_N)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES_K):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES_V):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    if EARLY_START:
        if SPLIT:
            gdc_launch_dependents()  # the merge may set itself up; it waits for this kernel's end
        gdc_wait()  # the kernel before this one has finished and its results are visible from here on

    # Which tile of queries: neighbouring programs share a key head. The last rows see the most keys: they start first.
    TILE: gl.constexpr = CONSUMERS * QUERIES
    most_queries = seqlen_q
    tiles_m = (seqlen_q + TILE - 1) // TILE
    tile_m, rest = gl.program_id(0) % tiles_m, gl.program_id(0) // tiles_m
    if CAUSAL:
        tile_m = tiles_m - 1 - tile_m
    first_head, rest = rest % HEAD_TILES * BLOCK_G, rest // HEAD_TILES
    batch, head_kv = rest // heads_kv, rest % heads_kv
    split = gl.program_id(1)
    lengths = (cu_seqlens_q, cu_seqlens_k, cache_seqlens, cache_batch_idx)
    # Of sequences of many lengths the longest start first, and the short ones fill the end (Graham 1969).
    if BATCHES > 0:
        batch = _longest(lengths, batch, batches, BATCHES)
        rest = batch * heads_kv + head_kv
    row_q, first_q, seqlen_q, row_k, first_k, seqlen_k = _sequence(lengths, batch, seqlen_q, seqlen_k)

    # Which keys: the tiles [low, high), those of a piece where they are split; a tile that pads an unrolled few is hidden.
    first_row = tile_m * TILE
    diagonal = seqlen_k - seqlen_q
    if TOPLEFT:
        diagonal = gl.to_tensor(0)
    if right is not None:
        diagonal += right
    end = seqlen_k
    if CAUSAL:
        end = gl.minimum(end, gl.minimum(first_row + TILE, seqlen_q) + diagonal)
    tiles = (gl.maximum(end, 0) + BLOCK_N - 1) // BLOCK_N
    low = gl.to_tensor(0)
    if left is not None:
        low = gl.maximum(first_row + diagonal - _behind(left, right), 0) // BLOCK_N
        tiles = gl.maximum(tiles - low, 0)
    high = low + tiles
    if SPLIT:
        used = gl.maximum(gl.minimum(splits, (tiles + MIN_TILES - 1) // MIN_TILES), 1)
        high = low + gl.where(split < used, tiles * (split + 1) // used, tiles * split // used)
        low += tiles * split // used
    count = gl.where((high > low) & (first_row < seqlen_q), gl.maximum(high - low, PEELED), 0)

    batch64, head64 = batch.to(gl.int64), (head_kv * GROUP).to(gl.int64)
    in_heads = rest.to(gl.int64) * most_queries * GROUP + first_row * GROUP  # of packed rows, those of partials
    part_at = (in_heads * splits + split) * DV
    sums_at = all_rows.to(gl.int64) * splits * DV + (in_heads * splits + split) * 2
    if cu_seqlens_q is None:
        out_at = batch64 * stride_ob + head64 * stride_oh + first_row.to(gl.int64) * stride_om
        lse_at = (batch64 * heads_kv * GROUP + head64) * stride_lse + first_row
    else:
        out_at = head64 * stride_oh + (first_q + first_row).to(gl.int64) * stride_om
        lse_at = head64 * stride_lse + first_q + first_row
    keys = (row_k, first_k)
    if PAGE > 0:
        keys = (page_table + batch64 * stride_table, (seqlen_k + PAGE - 1) // PAGE)
    place = (row_q, head_kv, first_head, first_q + first_row, keys, low, high, count)
    span = (low, high, count, first_head, first_row, seqlen_q, seqlen_k, diagonal, left, right)
    if sinks is not None:
        sinks += head_kv * GROUP
    output = (out_base, lse_base, partials, sinks, out_at, lse_at, part_at, sums_at, stride_oh, stride_om, stride_lse, splits)
    descs = (q_descs, k_descs, v_descs)
    memory = (q_smem, k_smem, v_smem)
    barriers = (q_full, k_full, k_empty, v_full, v_empty)
    scale_log2 = softmax_scale * 1.4426950408889634
    scales = (scale_log2, softcap)
    if softcap is not None:  # of what ``capped`` gives, and of the scores in it
        scales = (2.0 * softcap * 1.4426950408889634, 2.0 * scale_log2 / softcap)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        memory, barriers, span, output, scales,
                        0, QUERIES, GROUP, DV, PEELED, CAUSAL, SPLIT, ZEROED, COMPENSATED,
                    ),
                ),
                (_produce, (descs, memory, barriers, place, CONSUMERS, QUERIES, PAGE)),
            ],
            [1],
            [PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        memory, barriers, span, output, scales,
                        0, QUERIES, GROUP, DV, PEELED, CAUSAL, SPLIT, ZEROED, COMPENSATED,
                    ),
                ),
                (
                    _consume,
                    (
                        memory, barriers, span, output, scales,
                        1, QUERIES, GROUP, DV, PEELED, CAUSAL, SPLIT, ZEROED, COMPENSATED,
                    ),
                ),
                (_produce, (descs, memory, barriers, place, CONSUMERS, QUERIES, PAGE)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )


# The launch -------------------------------------------------------------------------------------------------------------------


class _Variant(NamedTuple):
    """What a build is specialised on beside its plan, and sizes decide."""

    group: int
    split: bool
    compensated: bool
    batches: int = 0  # a power of two of at least as many sequences, where the longest start first
    strides: Hashable = None


def _compared(problem: AttentionProblem, batch: int, programs: int, config: Config, gpu: Gpu) -> int:
    """``_Variant.batches`` of so many sequences and programs: 0 where all programs run at once, or lengths are too many."""
    if problem.modes.lengths == "equal" or not 1 < batch <= MOST_ORDERED or programs <= gpu.sm_count * config["occupancy"]:
        return 0
    return next_power_of_2(batch)


_FAR = 2**28  # a window that hides nothing; two of them and a position still fit 32 bits


def _window(problem: AttentionProblem) -> tuple[int | None, int | None]:
    """How many keys before its diagonal a query sees, and how many after it where the mask is not causal: None for no limit."""
    left, right = problem.modes.window_left, None if problem.causal else problem.modes.window_right
    return (None if left is None else min(left, _FAR)), (None if right is None else min(right, _FAR))


def _constexprs(problem: AttentionProblem, config: Config, variant: _Variant, early: bool) -> dict[str, Any]:
    queries = config["consumers"] * queries_of(variant.group)
    left, right = _window(problem)
    ends = problem.causal or right is not None
    producer = PRODUCER_REGISTERS if rows_of_copy(problem, config) == config["block_n"] else PAGES_REGISTERS
    return {
        "GROUP": variant.group,
        "DV": problem.head_dim_v,
        "CONSUMERS": config["consumers"],
        "BLOCK_N": config["block_n"],
        "STAGES_K": config["stages_k"],
        "STAGES_V": config["stages_v"],
        "MIN_TILES": min_tiles(config),
        # The diagonal of a program's queries passes so many tiles of keys at the most.
        "PEELED": 1 + cdiv(queries - 1, config["block_n"]) if ends and left is None else 1,
        "CAUSAL": ends,
        "TOPLEFT": problem.mask == "causal-topleft",
        "SPLIT": variant.split,
        "COMPENSATED": variant.compensated,
        "PAGE": problem.modes.page,
        "BATCHES": variant.batches,
        "EARLY_START": early,
        "CONSUMER_REGS": consumer_registers(config, producer),
        "PRODUCER_REGS": producer,
    }


def _tiles(problem: AttentionProblem, config: Config, group: int) -> tuple[Tile | None, ...]:
    """Copies of Q, K and V, then of their second parts: None for each that has none."""
    parts, parts_v = head_parts(problem.head_dim), value_parts(problem.head_dim_v)
    of_q, of_k = (1, 1, heads_of(group), queries_of(group)), (1, 1, rows_of_copy(problem, config))
    tensors = ((of_q, parts), (of_k, parts), (of_k, parts_v))
    return tuple((*rows, widths[n]) if n < len(widths) else None for n in range(2) for rows, widths in tensors)


class _Started(NamedTuple):
    """A build of the main kernel, the templates of its descriptors, and the constexprs that end its arguments."""

    build: Build
    templates: tuple[TensorDescriptor | None, ...]
    constexprs: tuple[Any, ...]


# (q, k, v, out, lse, the partials, the modes' tensors, softmax_scale, softcap)
_Launch = Callable[[Any, Any, Any, Any, Any, Any, tuple[Any, ...], float, float | None], None]


class ChunkLauncher(Launcher):
    """The kernels with a config, for tensors of any lengths, batch and strides; all else as in the inputs that they were
    planned for. As SplitLauncher of split_triton.py: ``bind`` for problems without modes, ``bind_inputs`` with any."""

    def __init__(self, inputs: AttentionInputs, config: Config) -> None:
        check_copied(inputs)
        gpu = current_gpu(inputs.q.device)
        assert gpu is not None
        self._problem, self._config, self._gpu = inputs.problem, config, gpu
        self._early, self._write_lse = can_start_early(inputs.q.device), inputs.return_lse
        self._out = Pointer(inputs.q.dtype, 0 if inputs.out is None else inputs.out.data_ptr())
        self._lse = Pointer(torch.float32, 4) if inputs.return_lse else None
        x = inputs.extras
        self._tensors = tuple(None if one is None else Pointer(one.dtype, 4) for one in _tensors(x))
        self._options = {"num_warps": 4, "maxnreg": registers(config), "launch_pdl": self._early}
        self._builds: dict[_Variant, _Started] = {}
        self._merges: dict[tuple[Any, ...], Callable[..., None]] = {}

    def bind(self, shapes: Shapes, strides: Shapes) -> BoundLaunch:
        """The launch of a problem without modes, for tensors of such shapes and strides."""
        (batch, heads, rows, _), (_, heads_kv, keys, _), _ = shapes
        call = _Call(batch, heads, heads_kv, rows, keys, keys, rows, 0, shapes, strides)
        launch, floats = self._bind(call, 0)
        none = (None,) * len(self._tensors)
        new = allocator(on_gpu=True)

        def bound(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float
        ) -> None:
            partials = new((floats,), (1,), torch.float32) if floats else None
            launch(q, k, v, argument(out), argument(lse), argument(partials), none, scale, None)

        return bound

    def bind_inputs(self, inputs: AttentionInputs, num_splits: int = 0) -> Callable[[AttentionInputs], AttentionOutput]:
        """The call of inputs of the same shapes, strides and most lengths as these."""
        launch, floats = self._bind_call(inputs, num_splits)
        results, capped = results_of(inputs, floats), bool(self._problem.modes.softcap)

        def bound(inputs: AttentionInputs) -> AttentionOutput:
            out, lse, partials = results(inputs.out)
            tensors = tuple([argument(one) for one in _tensors(inputs.extras)])
            of_heads = (argument(out), argument(lse), argument(partials))
            softcap = inputs.extras.softcap if capped else None
            launch(inputs.q, inputs.k, inputs.v, *of_heads, tensors, inputs.softmax_scale, softcap)
            return AttentionOutput(out, lse)

        return bound

    def bind_cache(self, inputs: AttentionInputs, num_splits: int, append: Append | None) -> CacheLaunch | None:
        """The call of tensors like these, without a look at them; None where something is appended, or each call says a length
        of all sequences."""
        x = inputs.extras
        if append is not None or x.cache_seqlens is x.cu_seqlens_k is None:
            return None
        launch, floats = self._bind_call(inputs, num_splits)
        results, scale = results_of(inputs, floats, tokens_first=True), inputs.softmax_scale
        softcap = x.softcap if self._problem.modes.softcap else None

        def run(
            tensors: tuple[torch.Tensor | None, ...], length: int, softmax_scale: float | None
        ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
            q, k, v, cu_q, cu_k, seqlens, table, places, _, sinks, *_ = tensors
            if not are_aligned(q, k, v):
                return None
            out, lse, partials = results(None)
            of_heads = (argument(out), argument(lse), argument(partials))
            of_modes = tuple([argument(one) for one in (cu_q, cu_k, seqlens, places, table, sinks)])
            launch(q, k, v, *of_heads, of_modes, scale if softmax_scale is None else softmax_scale, softcap)
            return out, lse

        return run

    def _bind_call(self, inputs: AttentionInputs, num_splits: int) -> tuple[_Launch, int]:
        """``_bind`` for inputs with modes."""
        q, k, v, x, out = inputs.q, inputs.k, inputs.v, inputs.extras, inputs.out
        (batch, heads, rows, _), (_, heads_kv, capacity, _) = q.shape, k.shape
        seqlen_q = rows
        if x.cu_seqlens_q is not None:
            batch, seqlen_q = x.cu_seqlens_q.shape[0] - 1, x.max_seqlen_q
        stride_table = 0
        if x.page_table is not None:
            capacity, stride_table = x.page_table.shape[1] * capacity, x.page_table.stride(0)
        most_keys = x.max_seqlen_k if x.cu_seqlens_k is not None else min(capacity, x.max_seqlen_k or capacity)
        strides = (q.stride(), k.stride(), v.stride(), shapes_of_results(inputs)[1] if out is None else out.stride())
        shapes = (q.shape, k.shape, v.shape)
        call = _Call(batch, heads, heads_kv, seqlen_q, capacity, most_keys, rows, stride_table, shapes, strides)
        return self._bind(call, num_splits)

    def _bind(self, call: _Call, num_splits: int) -> tuple[_Launch, int]:
        """The launch of such a call, and how many numbers its partials are."""
        config, group = self._config, call.heads // call.heads_kv
        span = span_of(self._problem, group, call.seqlen_q, config)
        work = work_of(call.batch * call.heads_kv, group, call.seqlen_q, call.most_keys, config, span)
        splits = splits_for(work, config, self._gpu, num_splits)
        programs, all_rows = work.heads * work.tiles_m, call.batch * call.heads * call.seqlen_q
        if max(programs, all_rows) >= 2**31:
            raise CannotServe(f"it takes {max(programs, all_rows)} programs; a launch may have {2**31 - 1}")
        of_q, of_k, of_v, of_out = call.strides
        of_q = copied_strides("query", call.shapes[0], of_q)
        packed = self._tensors[0] is not None
        strides_out = (0 if packed else of_out[0], of_out[1], of_out[2])
        batches = _compared(self._problem, call.batch, programs * splits, config, self._gpu)
        variant = _Variant(group, splits > 1, self._write_lse, batches, stride_class(strides_out))
        started = self._builds.get(variant) or self._build(variant, strides_out)
        rows_q, total_q = call.shapes[0][0], call.shapes[0][2]
        shape_q = (rows_q, call.heads_kv, group, total_q, self._problem.head_dim)
        encoders = (
            encoders_of(started.build, started.templates, 0, shape_q, (of_q[0], of_q[1] * group, *of_q[1:])),
            encoders_of(started.build, started.templates, 1, call.shapes[1], copied_strides("key", call.shapes[1], of_k)),
            encoders_of(started.build, started.templates, 2, call.shapes[2], copied_strides("value", call.shapes[2], of_v)),
        )
        numbers = (*strides_out, call.stride_lse, call.heads_kv, call.seqlen_q, call.seqlen_k, splits, all_rows)
        tail = (*_window(self._problem), *numbers, call.stride_table, call.batch, *started.constexprs)
        grid = (programs, splits, 1)
        if splits == 1:
            return partial(_launch_one, started.build.launch, grid, encoders, tail), 0
        merge, constexprs = self._merge(variant, splits, strides_out)
        merge_grid = (chunk_merge.programs(all_rows, self._problem.head_dim_v), 1, 1)
        merge_tail = (*strides_out, call.stride_lse, call.heads_kv, call.seqlen_q, splits, all_rows, *constexprs)
        floats = partial_bytes(all_rows, splits, self._problem.head_dim_v) // 4
        launch = partial(_launch_two, started.build.launch, grid, encoders, tail, merge, merge_grid, merge_tail)
        return launch, floats

    def _build(self, variant: _Variant, strides_out: tuple[int, ...]) -> _Started:
        problem, config = self._problem, self._config
        tiles = _tiles(problem, config, variant.group)
        templates = tuple(None if tile is None else template(tile, problem.dtype) for tile in tiles)
        constexprs = tuple(_constexprs(problem, config, variant, self._early).values())
        partials = Pointer(torch.float32) if variant.split else None
        pointers = (self._out, self._lse, partials, *self._tensors)
        numbers = (0.5, 0.5 if problem.modes.softcap else None, *_window(problem), *strides_out, *[1] * len(_LAST_SIZES))
        arguments = (*templates, *pointers, *numbers, *constexprs)
        build = Build(flashmoe_chunk_gluon_sm90, arguments, **self._options)
        made = self._builds[variant] = _Started(build, templates, constexprs)
        return made

    def _merge(self, variant: _Variant, splits: int, strides: tuple[int, ...]) -> tuple[Callable[..., None], tuple[Any, ...]]:
        constexprs = tuple(chunk_merge.constexprs(variant.group, self._problem.head_dim_v, splits, self._early).values())
        key = (variant.strides, constexprs)
        launch = self._merges.get(key)
        if launch is None:
            launch = chunk_merge.build(
                self._out, self._lse, self._tensors[0], self._tensors[-1], strides, constexprs, self._early
            )
            self._merges[key] = launch
        return launch, constexprs


class _Call(NamedTuple):
    """What a launch is bound to beside its plan. ``seqlen_k``: the capacity, past which nothing is read; ``most_keys``: the
    most that a sequence has, for the number of splits; ``stride_table``: entries from a sequence's pages to the next's; shapes
    of Q, K and V, and strides of them and of O."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    most_keys: int
    stride_lse: int
    stride_table: int
    shapes: Shapes
    strides: Shapes


def _tensors(x: Extras) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a call's modes as the kernel takes them: the packed queries' first, the sinks last."""
    return x.cu_seqlens_q, x.cu_seqlens_k, x.cache_seqlens, x.cache_batch_idx, x.page_table, x.sinks


def _launch_one(
    start: Callable[..., None], grid: Grid, encoders: tuple[Parts, ...], tail: tuple[Any, ...],
    q: Any, k: Any, v: Any, out: Any, lse: Any, partials: Any, tensors: tuple[Any, ...], scale: float, softcap: float | None,
) -> None:  # fmt: skip
    start(grid, *described(encoders, (q, k, v)), out, lse, None, *tensors, scale, softcap, *tail)


def _launch_two(
    start: Callable[..., None], grid: Grid, encoders: tuple[Parts, ...], tail: tuple[Any, ...],
    merge: Callable[..., None], merge_grid: Grid, merge_tail: tuple[Any, ...],
    q: Any, k: Any, v: Any, out: Any, lse: Any, partials: Any, tensors: tuple[Any, ...], scale: float, softcap: float | None,
) -> None:  # fmt: skip
    start(grid, *described(encoders, (q, k, v)), out, lse, partials, *tensors, scale, softcap, *tail)
    merge(merge_grid, partials, out, lse, tensors[0], tensors[-1], *merge_tail)


# What is promised -----------------------------------------------------------------------------------------------------------


def plan(inputs: AttentionInputs, config: Config) -> ChunkLauncher:
    return ChunkLauncher(inputs, config)


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    return ChunkLauncher(inputs, config).bind_inputs(inputs)(inputs)


def _grid(problem: AttentionProblem, config: Config, gpu: Gpu) -> Grid:
    work = work_in(problem, config)
    return (work.heads * work.tiles_m, splits_for(work, config, gpu), 1)


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    grid = _grid(problem, config, gpu)
    main = Launch(f"^{flashmoe_chunk_gluon_sm90.__name__}$", grid, threads(config))
    rows = problem.batch * problem.heads * problem.seqlen_q
    merge_grid = (chunk_merge.programs(rows, problem.head_dim_v), 1, 1)
    merge = Launch(f"^{chunk_merge.flashmoe_chunk_merge.__name__}$", merge_grid, 32 * chunk_merge.WARPS)
    return (main,) if grid[1] == 1 else (main, merge)


def compile_job(problem: AttentionProblem, config: Config, gpu: Gpu) -> CompileJob:
    """Of the main kernel; the merge is a few loads."""
    group, modes, paged = problem.heads // problem.heads_kv, problem.modes, problem.modes.page > 0
    programs, splits, _ = _grid(problem, config, gpu)
    split, batches = splits > 1, _compared(problem, problem.batch, programs * splits, config, gpu)
    constexprs = _constexprs(problem, config, _Variant(group, split, True, batches), early=True)
    signature = dict.fromkeys(flashmoe_chunk_gluon_sm90.arg_names, "i32") | {"softmax_scale": "fp32"}
    signature |= {"out_base": f"*{problem.dtype}", "lse_base": "*fp32"}
    (left, right), packed = _window(problem), modes.lengths == "packed"
    types = descriptor_types("qkv", _tiles(problem, config, group), problem.dtype) | {
        "partials": "*fp32" if split else None, "sinks": "*fp32" if modes.sinks else None,
        "cu_seqlens_q": "*i32" if packed else None, "cu_seqlens_k": "*i32" if packed and not paged else None,
        "cache_seqlens": "*i32" if modes.lengths == "ragged" or paged else None, "cache_batch_idx": None,
        "page_table": "*i32" if paged else None, "softcap": "fp32" if modes.softcap else None,
        "left": None if left is None else "i32", "right": None if right is None else "i32",
    }  # fmt: skip
    signature |= {name: one for name, one in types.items() if one is not None}
    constexprs |= {name: None for name, one in types.items() if one is None}
    aligned = ("stride_ob", "stride_oh", "stride_om") if problem.head_dim_v % 16 == 0 else ()
    return CompileJob(
        function=flashmoe_chunk_gluon_sm90,
        signature=signature | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        divisible_by_16=("out_base", *(("partials",) if split else ()), *aligned),
        num_warps=4,
        num_stages=1,
        threads=threads(config),
        maxnreg=registers(config),
        gluon=True,
    )


KERNEL = AttentionKernel(
    name=NAME,
    origin="ours",
    op="attention",
    about="warp-specialised Gluon for Hopper for few queries of many keys: packed query heads, keys split over programs",
    supports=supports,
    configs=configs,
    run=run,
    launches=launches,
    plan=plan,
    workspace=workspace,
    compile_job=compile_job,
    suits=suits,
)
