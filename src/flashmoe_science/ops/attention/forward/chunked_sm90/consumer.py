"""A consumer of chunk_gluon_sm90: a warpgroup that attends 64 packed rows to a split of the keys.

The consumer writes O and LSE where keys are not split, else partials for device/merge_gluon.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from flashmoe_science.ops.attention.device.kv_pipeline import RowState, first_kv, release_k, start_values
from flashmoe_science.ops.attention.device.output import no_output, scale_rows, store_rows, to_operand, wait_for_output
from flashmoe_science.ops.attention.device.softcap import capped, uncapped_max
from flashmoe_science.ops.attention.device.softmax import log_sum_exp, normalizer, own_sums, softmax_step
from flashmoe_science.ops.attention.device.tiles import accumulator_layout, as_matrix, start_scores
from flashmoe_science.ops.attention.forward.chunked_sm90.step import ROWS, mask, mask_window, row_window, tile_step
from flashmoe_science.ops.gluon_bridge import barrier


@gluon.jit
def _zero_part_after(tile, rows, BLOCK_N: gl.constexpr):
    SLICE: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for first in gl.static_range(0, BLOCK_N, SLICE):
        if rows < first + SLICE:
            part = tile.slice(first, SLICE, 0)
            row = gl.expand_dims(first + gl.arange(0, SLICE, gl.SliceLayout(1, layout)), 1)
            values = part.load(layout)  # [SLICE, width]
            part.store(gl.where(row < rows, values, gl.zeros_like(values)))


@gluon.jit
def _zero_after(v_smem, stage, rows):
    """Make the rows of a tile of V from ``rows`` on zeros: a cache may hold NaN past a sequence's length, and 0 * NaN is NaN.

    Consumers do so each, with the same values.
    """
    _zero_part_after(as_matrix(v_smem[0], stage), rows, v_smem[0].shape[-2])
    if len(v_smem) == 2:
        _zero_part_after(as_matrix(v_smem[1], stage), rows, v_smem[1].shape[-2])
    fence_async_shared()
    barrier()


@gluon.jit
def _write(output, rows, o, row_max, row_sum, CONSUMER: gl.constexpr, SEEN: gl.constexpr, TRAITS: gl.constexpr):
    """Write the partials of a consumer's rows, or where keys are not split the output. ``SEEN``: there were keys."""
    QUERIES: gl.constexpr = TRAITS.QUERIES
    row = gl.arange(0, ROWS, row_max.type.layout)  # [BLOCK_M]
    query = CONSUMER * QUERIES + row % QUERIES  # of the program's
    head = (rows.first_head + row // QUERIES).to(gl.int64)
    row_ok = (rows.first_row + query < rows.seqlen_q) & (head < TRAITS.GROUP)
    if TRAITS.SPLIT:
        packed = query * TRAITS.GROUP + head
        if SEEN:  # of a split without keys the merge reads no more than its sum of 0
            store_rows(output.partials + output.part_at, packed * output.splits * TRAITS.DV, row_ok, o, TRAITS.DV)
        sums = output.partials + output.sums_at + packed * output.splits * 2
        gl.store(sums, row_max, mask=row_ok)
        gl.store(sums + 1, row_sum, mask=row_ok)
    else:
        sink = output.sinks
        if output.sinks is not None:
            sink = gl.load(output.sinks + head, mask=row_ok, other=0.0)
        row_max, row_sum, scale = normalizer(row_max, row_sum, sink)
        o = scale_rows(o, scale)
        out = output.out + output.out_at
        store_rows(out, query.to(gl.int64) * output.stride_om + head * output.stride_oh, row_ok, o, TRAITS.DV)
        if output.lse is not None:
            lse = log_sum_exp(row_max, row_sum)
            gl.store(output.lse + output.lse_at + head * output.stride_lse + query, lse, mask=row_ok)


@gluon.jit
def consume(buffers, barriers, rows, output, scales, CONSUMER: gl.constexpr, TRAITS: gl.constexpr):
    """A consumer: 64 rows of the program's tile of queries."""
    QUERIES: gl.constexpr = TRAITS.QUERIES
    PEELED: gl.constexpr = TRAITS.PEELED
    BLOCK_N: gl.constexpr = buffers.k[0].shape[-2]
    row_layout: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_N))
    low, high, count = rows.tiles
    if count > 0:
        end = gl.full([ROWS], 0, gl.int32, row_layout) + rows.seqlen_k  # of the keys that each row sees
        if TRAITS.CAUSAL:
            query = rows.first_row + CONSUMER * QUERIES + gl.arange(0, ROWS, row_layout) % QUERIES
            end = gl.minimum(query + rows.diagonal + 1, end)
        window = rows.left
        if rows.left is not None:
            window = row_window(rows.first_row + CONSUMER * QUERIES, rows, end, QUERIES, BLOCK_N, TRAITS.CAUSAL)
        first = first_kv()

        # The first tile, alone.
        mbarrier.wait(barriers.q_full.index(CONSUMER), 0)
        mbarrier.wait(barriers.k_full.index(first.k.stage), first.k.phase)
        s = warpgroup_mma_wait(0, [start_scores(buffers.q, CONSUMER, buffers.k, first.k.stage)])  # [BLOCK_M, BLOCK_N]
        first = release_k(barriers, first)
        if scales.cap is not None:
            s = capped(s, scales.cap)
        if rows.left is None:
            s = mask(s, high - 1, low, end)
        else:
            s = mask_window(s, high - 1, window.first, end)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, row_layout)  # [BLOCK_M]
        p32, row_max, unused = softmax_step(s, row_max, scales.log2, True, False)
        row_sum = own_sums(p32)  # [BLOCK_M, 4]
        o = no_output(buffers.v, ROWS)  # [BLOCK_M, width]
        # First named here, and in this order: loops carry values in the order of their names.
        state, kv = RowState(to_operand(p32, o, buffers.v[0].dtype), o, row_max, row_sum, gl.zeros_like(row_sum)), first
        if TRAITS.ZEROED:
            mbarrier.wait(barriers.v_full.index(first.v.stage), first.v.phase)
            if high * BLOCK_N > rows.seqlen_k:
                _zero_after(buffers.v, first.v.stage, rows.seqlen_k - (high - 1) * BLOCK_N)
        else:  # it has long completed: a branch across which the assembler moves no part of the second tile, which would spill
            mbarrier.wait(barriers.q_full.index(CONSUMER), 0)

        # The others: those that the diagonal may cross, then plain.
        for i in gl.static_range(1, PEELED):
            state, kv = tile_step(
                high - 1 - i, buffers, barriers, scales, low, end, window, state, kv, CONSUMER, True, TRAITS
            )  # fmt: skip
        for i in range(PEELED, count):
            state, kv = tile_step(
                high - 1 - i, buffers, barriers, scales, low, end, window, state, kv, CONSUMER, rows.left is not None, TRAITS
            )  # fmt: skip
        mbarrier.wait(barriers.v_full.index(kv.v.stage), kv.v.phase)
        o = wait_for_output(start_values(state.p, state.o, buffers, barriers, kv, None))
        row_max = uncapped_max(state.max, scales)
        total = gl.convert_layout(gl.sum(state.sum, 1), row_layout)  # [BLOCK_M]
        _write(output, rows, o, row_max, total, CONSUMER, True, TRAITS)
    else:
        none = gl.zeros([ROWS], gl.float32, row_layout)
        _write(output, rows, no_output(buffers.v, ROWS), none + float("-inf"), none, CONSUMER, False, TRAITS)
