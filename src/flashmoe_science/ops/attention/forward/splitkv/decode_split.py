"""Attention of a few packed rows to one split of a sequence's keys, in Gluon.

The bounds of the split, the copies of its tiles to shared memory, their products, and the stores: the output where the sequence
has no other split, else partials for merge_triton.py. A tile of keys is parted among the warps, so that tensors have the warps
as their first dimension: of BLOCK_N keys each warp has OWN.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from flashmoe_science.ops.attention.device.pages import page_of
from flashmoe_science.ops.attention.device.partials import store_sums, sums_at
from flashmoe_science.ops.attention.device.ranges import tiles_between, tiles_in_range, used_splits
from flashmoe_science.ops.attention.device.sequences import cache_of, keys_of, left_padding
from flashmoe_science.ops.attention.device.softmax_triton import log_sum_exp, with_sink
from flashmoe_science.ops.attention.device.warps import copied_columns, copied_keys, sum_of_warps, swizzled
from flashmoe_science.ops.attention.forward.splitkv.records import Strided
from flashmoe_science.ops.gluon_bridge import cp_async


class _Copied(NamedTuple):
    """The keys [start, end) of which tiles are copied, others being zeros, and the sequence's row of the page table."""

    start: tl.tensor
    end: tl.tensor
    table: tl.tensor


@gluon.jit
def _inside(key, copied, BEGINS: gl.constexpr):
    """Whether keys are copied."""
    inside = key < copied.end
    if BEGINS:
        inside = inside & (key >= copied.start)
    return inside


@gluon.jit
def _pages(first_key, copied, WIDTH: gl.constexpr, traits: gl.constexpr):
    """The pages of a tile's keys: one, or each key's."""
    if traits.PAGE == 0:
        return first_key
    elif traits.PAGE % traits.BLOCK_N == 0:
        page = first_key * 0
        if first_key < copied.end:
            page = page_of(copied.table, first_key, None, None, traits.PAGE)
        return page
    else:
        key = first_key + copied_keys(traits.WARPS, traits.BLOCK_N // traits.WARPS, WIDTH)  # [WARPS, OWN]
        return page_of(copied.table, key, _inside(key, copied, traits.BEGINS), 0, traits.PAGE)


@gluon.jit
def _start_copy(smem, tensor, page, first_key, copied, D: gl.constexpr, traits: gl.constexpr):
    """Start copies of a tile of K or V to ``smem`` [WARPS, OWN, WIDTH]; zeros past the head's own ``D`` columns."""
    WARPS: gl.constexpr = smem.shape[0]
    OWN: gl.constexpr = smem.shape[1]
    WIDTH: gl.constexpr = smem.shape[2]
    PAGE: gl.constexpr = traits.PAGE
    place, column = copied_keys(WARPS, OWN, WIDTH), copied_columns(WARPS, WIDTH)  # [WARPS, OWN], [1, 1, WIDTH]
    key = first_key + place
    inside = _inside(key, copied, traits.BEGINS)
    if PAGE % (WARPS * OWN) == 0:
        if PAGE == 0:
            first_row = first_key.to(gl.int64) * tensor.stride_m
        else:
            first_row = page.to(gl.int64) * tensor.stride_b + (first_key % PAGE).to(gl.int64) * tensor.stride_m
        # Unsigned: to extend signed offsets to 64 bits takes three times the instructions, for which the first copies wait.
        offsets = (gl.expand_dims(place * tensor.stride_m, 2) + column).to(gl.uint32).to(gl.int64)  # [WARPS, OWN, WIDTH]
        pointers = tensor.base + first_row + offsets
    else:
        rows = page.to(gl.int64) * tensor.stride_b + key % PAGE * tensor.stride_m  # [WARPS, OWN]
        pointers = tensor.base + gl.expand_dims(rows, 2) + column  # [WARPS, OWN, WIDTH]
    if D == WIDTH:
        cp_async(smem, pointers, mask=gl.expand_dims(inside, 2))
    else:
        cp_async(smem, pointers, mask=gl.expand_dims(inside, 2) & (column < D))
    async_copy.commit_group()


@gluon.jit
def _start_query(smem, q, batch, head_kv, seqlen_q, traits: gl.constexpr):
    """Start copies of the packed rows of Q to ``smem`` [BLOCK_M, BLOCK_D]."""
    ACROSS: gl.constexpr = traits.BLOCK_D // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [traits.WARPS, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, traits.BLOCK_M, gl.SliceLayout(1, layout)), 1)  # [BLOCK_M, 1]
    column = gl.expand_dims(gl.arange(0, traits.BLOCK_D, gl.SliceLayout(0, layout)), 0)  # [1, BLOCK_D]
    q_tile = q.base + batch * q.stride_b + head_kv * traits.GROUP * q.stride_h
    cp_async(
        smem, q_tile + (row % traits.GROUP) * q.stride_h + (row // traits.GROUP) * q.stride_m + column,
        mask=(row < seqlen_q * traits.GROUP) & (column < traits.D),
    )  # fmt: skip
    async_copy.commit_group()


@gluon.jit
def attend_split(
    batch, head_kv, split, stream_k, operands, sequences, scores, partials, SPLIT: gl.constexpr, traits: gl.constexpr
):  # fmt: skip
    """Attend the rows of a sequence and key head to a split of its keys; store the output where the sequence has no other
    split, else partials. ``stream_k``: whether the split is the tiles of a range; None where it never is.
    """
    dtype: gl.constexpr = operands.q.base.dtype.element_ty
    WARPS: gl.constexpr = traits.WARPS
    STAGES: gl.constexpr = traits.NUM_STAGES
    BLOCK_M: gl.constexpr = traits.BLOCK_M
    BLOCK_N: gl.constexpr = traits.BLOCK_N
    BLOCK_D: gl.constexpr = traits.BLOCK_D
    BLOCK_DV: gl.constexpr = traits.BLOCK_DV
    OWN: gl.constexpr = BLOCK_N // WARPS
    MASKED: gl.constexpr = traits.ENDS or traits.BEGINS or traits.RIGHT
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], swizzled(BLOCK_D, [1, 0]))
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, WARPS, OWN, BLOCK_D], swizzled(BLOCK_D, [2, 1, 0]))
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, WARPS, OWN, BLOCK_DV], swizzled(BLOCK_DV, [2, 1, 0]))
    batch64, head_kv64, seqlen_q = batch.to(gl.int64), head_kv.to(gl.int64), sequences.seqlen_q
    _start_query(q_smem, operands.q, batch64, head_kv64, seqlen_q, traits)
    _, seqlen_k, _ = keys_of(sequences, batch)

    # The keys that some row sees, [start, end).
    diagonal = seqlen_k - seqlen_q
    start, end = 0, seqlen_k
    if sequences.leftpads is not None:
        start = left_padding(sequences.leftpads, batch)
    if traits.RIGHT:
        end = gl.minimum(end, seqlen_q + diagonal + scores.right)
    if traits.LEFT:
        start = gl.maximum(start, diagonal - scores.left)
    end = gl.maximum(end, start)
    first_tile, tiles = tiles_between(start, end, BLOCK_N, traits.BEGINS)
    low, high = first_tile, first_tile + tiles
    if SPLIT:
        used = used_splits(tiles, split.splits, traits.MIN_TILES)
        each = tiles // used
        more = tiles - each * used  # splits that have one tile more
        low = gl.minimum(first_tile + each * split.number + gl.minimum(split.number, more), first_tile + tiles)
        high = gl.where(split.number < used, low + each + (split.number < more).to(gl.int32), low)
    if stream_k is not None:
        own_low, own_high, from_start, to_end = tiles_in_range(
            first_tile, split.low_tile, split.high_tile, split.tiles, traits.MIN_TILES
        )  # fmt: skip
        low = gl.where(stream_k, own_low, low)
        high = gl.where(stream_k, gl.minimum(own_high, first_tile + tiles), high)
    k, v = operands.k, operands.v
    k_head, v_head = k.base + head_kv64 * k.stride_h, v.base + head_kv64 * v.stride_h
    table = None
    if traits.PAGE == 0:
        cached = cache_of(sequences.cache_batch_idx, batch)
        k_head += cached * k.stride_b
        v_head += cached * v.stride_b
    else:
        table = sequences.page_table + batch64 * sequences.stride_table
    k, v = Strided(k_head, k.stride_b, k.stride_h, k.stride_m), Strided(v_head, v.stride_b, v.stride_h, v.stride_m)
    copied = _Copied(start, gl.minimum(end, high * BLOCK_N), table)

    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left_operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right_operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    scale_log2 = scores.softmax_scale * 1.4426950408889634
    of_row: gl.constexpr = gl.SliceLayout(2, mma)
    row_max = gl.full([WARPS, BLOCK_M], float("-inf"), gl.float32, of_row)
    row_sum = gl.zeros([WARPS, BLOCK_M], gl.float32, of_row)
    acc = gl.zeros([WARPS, BLOCK_M, BLOCK_DV], gl.float32, mma)
    warp = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, of_row)), 1)  # [WARPS, 1]
    own_key = gl.expand_dims(gl.expand_dims(gl.arange(0, OWN, gl.SliceLayout(0, gl.SliceLayout(1, mma))), 0), 1)
    offset = gl.expand_dims(warp, 2) * OWN + own_key  # [WARPS, 1, OWN]
    query = gl.arange(0, BLOCK_M, gl.SliceLayout(0, of_row)) // traits.GROUP
    query = gl.expand_dims(gl.expand_dims(query, 0), 2)  # [1, BLOCK_M, 1]
    pages_k = _pages(low * BLOCK_N, copied, BLOCK_D, traits)
    pages_v = _pages(low * BLOCK_N, copied, BLOCK_DV, traits)
    # The first iterations only start copies: the code of a second loop for them would be read from memory as they wait.
    for coming in range(low, high + STAGES - 1):
        slot = (coming - low) % STAGES
        first_coming = coming * BLOCK_N
        _start_copy(k_smem.index(slot), k, pages_k, first_coming, copied, traits.D, traits)
        _start_copy(v_smem.index(slot), v, pages_v, first_coming, copied, traits.DV, traits)
        if traits.PAGE > 0:  # of the next tile, to be there when its copies start
            pages_k = _pages(first_coming + BLOCK_N, copied, BLOCK_D, traits)
            pages_v = _pages(first_coming + BLOCK_N, copied, BLOCK_DV, traits)
        number = coming - (STAGES - 1)
        if number >= low:
            slot = (number - low) % STAGES
            async_copy.wait_group(2 * STAGES - 1)
            q = gl.expand_dims(q_smem.load(gl.SliceLayout(0, left_operand)), 0)
            q, same = gl.broadcast(q, gl.zeros([WARPS, BLOCK_M, BLOCK_D], dtype, left_operand))  # [WARPS, BLOCK_M, BLOCK_D]
            k_tile = k_smem.index(slot).permute((0, 2, 1)).load(right_operand)  # [WARPS, BLOCK_D, OWN]
            s = mma_v2(q, k_tile, gl.zeros([WARPS, BLOCK_M, OWN], gl.float32, mma))  # [WARPS, BLOCK_M, OWN]
            if MASKED:
                key = number * BLOCK_N + offset
                seen = key < end
                if traits.RIGHT:
                    seen = seen & (key <= query + diagonal + scores.right)
                if traits.BEGINS:
                    seen = seen & (key >= start)
                if traits.LEFT:
                    seen = seen & (key >= query + diagonal - scores.left)
                s = gl.where(seen, s, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(s, 2) * scale_log2)  # [WARPS, BLOCK_M]
            # A row that has seen no key has a maximum of -inf; subtracting 0 instead keeps exp2(-inf) = 0 rather than NaN.
            shift = gl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = gl.exp2(row_max - shift)
            p = gl.exp2(s * scale_log2 - gl.expand_dims(shift, 2))  # [WARPS, BLOCK_M, OWN]
            row_sum = row_sum * rescale + gl.sum(p, 2)
            row_max = new_max
            acc = acc * gl.expand_dims(rescale, 2)  # [WARPS, BLOCK_M, BLOCK_DV]
            async_copy.wait_group(2 * STAGES - 2)
            v_tile = v_smem.index(slot).load(right_operand)  # [WARPS, OWN, BLOCK_DV]
            acc = mma_v2(gl.convert_layout(p.to(dtype), left_operand), v_tile, acc)
    async_copy.wait_group(0)

    row_max, row_sum, acc = sum_of_warps(acc, row_max, row_sum)  # [BLOCK_M], [BLOCK_M], [BLOCK_M, BLOCK_DV]
    max_rows = seqlen_q * traits.GROUP
    if not SPLIT if stream_k is None else gl.where(stream_k, from_start & to_end, not SPLIT):  # it has no other split
        _store_output(row_max, row_sum, acc, batch64, head_kv, max_rows, operands, scores.sinks, traits.GROUP, traits.DV)
    else:
        _store_partials(row_max, row_sum, acc, split, partials, max_rows, traits.DV)


@gluon.jit
def _store_partials(row_max, row_sum, acc, split, partials, max_rows, DV: gl.constexpr):
    """Store the maxima, sums and unscaled output of rows for the merge."""
    layout: gl.constexpr = acc.type.layout
    rows = gl.arange(0, acc.shape[0], row_max.type.layout)  # [BLOCK_M]
    row = gl.expand_dims(gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout)), 1)  # [BLOCK_M, 1]
    column = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout)), 0)  # [1, BLOCK_DV]
    slot = split.row * max_rows.to(gl.int64) * partials.slots + split.slot
    sums = sums_at(partials, slot, DV)
    gl.store(  # [BLOCK_M, BLOCK_DV]
        partials.base + slot * DV + row * (partials.slots * DV) + column, acc, mask=(row < max_rows) & (column < DV)
    )  # fmt: skip
    store_sums(sums + 2 * partials.slots * rows, row_max, row_sum, rows < max_rows)


@gluon.jit
def _store_output(
    row_max, row_sum, acc, batch, head_kv, max_rows, operands, sinks, GROUP: gl.constexpr, DV: gl.constexpr
):  # fmt: skip
    """Store the output and the log-sum-exp of rows that no other split has a part of. ``batch`` has 64 bits."""
    layout: gl.constexpr = acc.type.layout
    rows = gl.arange(0, acc.shape[0], row_max.type.layout)  # [BLOCK_M]
    row = gl.expand_dims(gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout)), 1)  # [BLOCK_M, 1]
    column = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout)), 0)  # [1, BLOCK_DV]
    if sinks is not None:
        sink = gl.load(sinks + head_kv * GROUP + rows % GROUP)
        row_max, row_sum, rescale = with_sink(sink, row_max, row_sum)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, layout)), 1)
    # A row that sees no key has a sum of 0: its output is 0 and its log-sum-exp log(0) = -inf.
    inverse = gl.convert_layout(1.0 / gl.where(row_sum == 0.0, 1.0, row_sum), gl.SliceLayout(1, layout))
    acc = acc * gl.expand_dims(inverse, 1)
    out = operands.out
    out_tile = out.base + batch * out.stride_b + head_kv.to(gl.int64) * GROUP * out.stride_h
    offsets = (row % GROUP) * out.stride_h + (row // GROUP) * out.stride_m
    gl.store(out_tile + offsets + column, acc.to(out.base.dtype.element_ty), mask=(row < max_rows) & (column < DV))
    if operands.lse is not None:
        head = batch * operands.heads_kv * GROUP + head_kv * GROUP + rows % GROUP
        at = head * operands.stride_lse + rows // GROUP
        gl.store(operands.lse + at, log_sum_exp(row_max, row_sum), mask=rows < max_rows)
