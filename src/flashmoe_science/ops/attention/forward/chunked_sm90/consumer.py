"""A consumer of chunk_gluon_sm90.py: a warpgroup that attends 64 packed rows to a piece of the keys.

The consumer writes O and LSE where keys are not split, else partials for chunk_merge.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from flashmoe_science.ops.attention.device.output import no_output, scale_rows, start_output, store_rows, wait_for_output
from flashmoe_science.ops.attention.device.softmax import capped, log2_of_sum, own_sums, softmax_step, with_sink
from flashmoe_science.ops.attention.device.tiles import as_matrix
from flashmoe_science.ops.attention.forward.chunked_sm90.step import (
    ROWS,
    limits_of,
    mask,
    mask_window,
    query_tiles,
    start_scores,
    tile_step,
)
from flashmoe_science.ops.gluon_bridge import barrier
from flashmoe_science.ops.pipeline_gluon import advance, first_stage


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
            store_rows(partials + part_at, packed * splits * DV, row_ok, o, DV)
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
        store_rows(out_base + out_at, query.to(gl.int64) * stride_om + head * stride_oh, row_ok, o, DV)
        if lse_base is not None:
            shift = gl.where(row_max == float("-inf"), 0.0, row_max)
            lse = (shift + log2_of_sum(row_sum)) * 0.6931471805599453
            gl.store(lse_base + lse_at + head * stride_lse + query, lse, mask=row_ok)


@gluon.jit
def consume(
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
        limits = limits_of(limit, first_row + CONSUMER * QUERIES, span, QUERIES, BLOCK_N, CAUSAL)
        stage_k, phase_k = first_stage()
        stage_v, phase_v = first_stage()

        # The first tile, alone.
        q = query_tiles(q_smem, CONSUMER)
        mbarrier.wait(q_full.index(CONSUMER), 0)
        mbarrier.wait(k_full.index(stage_k), phase_k)
        s = warpgroup_mma_wait(0, [start_scores(q, k_smem, stage_k)])
        mbarrier.arrive(k_empty.index(stage_k))
        stage_k, phase_k = advance(stage_k, phase_k, k_smem[0].shape[0])
        if scales[1] is not None:
            s = capped(s, scales[1])
        if left is None:
            s = mask(s, high - 1, low, limit)
        else:
            s = mask_window(s, high - 1, limits[0], limit)
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
            state, rings = tile_step(
                high - 1 - i, q, memory, barriers, scales, low, limits, state, rings, True, COMPENSATED, SPLIT
            )  # fmt: skip
        for i in range(PEELED, count):
            state, rings = tile_step(
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
