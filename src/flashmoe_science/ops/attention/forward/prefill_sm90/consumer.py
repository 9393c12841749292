"""A consumer of fwd_gluon_sm90.py: a warpgroup that attends 64 rows of each tile of queries to its keys, and writes O and LSE.

``_attend`` names the builds in which rescaling of O is conditional (device/output.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from flashmoe_science.ops.attention.device.bias import bias_rows, start_bias
from flashmoe_science.ops.attention.device.mask import mask_keys
from flashmoe_science.ops.attention.device.output import LAZY_ABOVE, no_output, scale_rows, wait_for_output
from flashmoe_science.ops.attention.device.softmax import log2_of_sum, own_sums, softmax_step, with_sink
from flashmoe_science.ops.attention.device.tiles import coordinates
from flashmoe_science.ops.attention.device.wide import in_parts, no_wide_output
from flashmoe_science.ops.attention.forward.prefill_sm90.schedule import key_tiles, piece, steps_of_program
from flashmoe_science.ops.attention.forward.prefill_sm90.step import carried, changed, start_scores, start_values, tile_step
from flashmoe_science.ops.gluon_bridge import tma_store
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, take


@gluon.jit
def _store(o_descs, place, row, o, o_smem, slot):
    """Start the copies of all parts of O to device memory, by way of shared memory that holds nothing else."""
    out = o_smem[0].index(slot)
    out.reshape(o[0].shape).store(o[0].to(o_smem[0].dtype))
    if len(o) == 2:
        rest = o_smem[1].index(slot)
        rest.reshape(o[1].shape).store(o[1].to(o_smem[1].dtype))
    fence_async_shared()
    tma_store(o_descs[0], coordinates(place, row, 0), out)
    if len(o) == 2:
        tma_store(o_descs[1], coordinates(place, row, o[0].shape[1]), rest)


@gluon.jit
def _let_pass(tiles, barriers, rings):
    """Take so many tiles of keys and give them back unread."""
    stage_k, phase_k, stage_v, phase_v = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    for _ in range(tiles):
        mbarrier.wait(k_full.index(stage_k), phase_k)
        mbarrier.arrive(k_empty.index(stage_k))
        stage_k, phase_k = advance(stage_k, phase_k, k_full.shape[0])
        mbarrier.wait(v_full.index(stage_v), phase_v)
        mbarrier.arrive(v_empty.index(stage_v))
        stage_v, phase_v = advance(stage_v, phase_v, v_full.shape[0])
    return stage_k, phase_k, stage_v, phase_v


@gluon.jit
def _pass(
    memory, barriers, sequence, causal_offset, prefix, left, top_row, turn, rings,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """What ``_attend`` takes of a sequence's last tile of queries, for a consumer whose rows would all lie past the end: the
    tensor cores are the others' alone."""
    batch, end_q, rows, keys = sequence
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    QUERIES: gl.constexpr = memory[0][0].shape[-2]
    BLOCK_N: gl.constexpr = memory[1][0].shape[-2]
    slot = turn % (q_full.shape[0] // CONSUMERS) * CONSUMERS + CONSUMER
    mbarrier.wait(q_full.index(slot), turn // (q_full.shape[0] // CONSUMERS) & 1)
    mbarrier.arrive(q_empty.index(slot))
    if prefix is not None:
        prefix = gl.load(prefix + batch)
    span = (rows, keys, keys - rows + causal_offset, prefix, left)
    low, high = key_tiles(top_row, CONSUMERS * QUERIES, span, BLOCK_N, CAUSAL, True)
    return _let_pass(high - low, barriers, rings)


@gluon.jit
def _attend(
    output, memory, barriers, sizes, sequence, prefix, left, top_row, head_all, turn, rings,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, ALIGNED: gl.constexpr, EVEN_K: gl.constexpr,
    WRITE_LSE: gl.constexpr, OWN_OUT: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """A consumer's 64 rows of one tile of queries, of ``head_all`` and, of packed sequences, of heads after it that share its
    keys. ``sequence``: of packed ones its number, where its queries end among all of them, how many it has, and how many keys;
    None else. ``prefix``: where the keys that all queries of a sequence see are, or None; ``left``: see ``mask_keys``."""
    o_descs, lse_base, scales, v_low, sinks, bias = output
    q_smem, k_smem, v_smem, o_smem = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds = sizes
    HEADS: gl.constexpr = q_smem[0].shape[-3]
    QUERIES: gl.constexpr = q_smem[0].shape[-2]
    ROWS: gl.constexpr = HEADS * QUERIES
    STAGES_Q: gl.constexpr = q_smem[0].shape[0] // CONSUMERS
    STAGES_K: gl.constexpr = k_smem[0].shape[0]
    STAGES_V: gl.constexpr = v_full.shape[0]
    BLOCK_N: gl.constexpr = k_smem[0].shape[-2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    # Conditional rescaling where it measured faster: of 64 columns for one consumer alone, of more always, and in the wide form
    # of fewer where a mask leaves less to hide behind.
    WIDE: gl.constexpr = v_low is not None
    COLUMNS: gl.constexpr = o_descs[0].block_type.shape[-1] + (o_descs[1].block_type.shape[-1] if WIDE else 0)
    NARROW: gl.constexpr = COLUMNS == LAZY_ABOVE and CONSUMERS == 1 and BLOCK_N == 128 and CAUSAL
    LAZY: gl.constexpr = COLUMNS > LAZY_ABOVE or NARROW or (WIDE and CAUSAL)
    PACKED: gl.constexpr = sequence is not None
    LEFT: gl.constexpr = left is not None
    COUNTED: gl.constexpr = ALIGNED or PACKED or LEFT  # whether loops may have no step
    ENDS: gl.constexpr = CAUSAL or not EVEN_K or LEFT  # whether the first tile needs a mask
    HIDES: gl.constexpr = ENDS or bias[0] is not None  # whether it may hold no key that a row sees
    lse_rows = seqlen_q
    batch = head_all // heads
    if PACKED:
        batch, seqlen_q, seqlen_k = sequence[0], sequence[2], sequence[3]
        causal_offset += seqlen_k - seqlen_q
    if prefix is not None:
        prefix = gl.load(prefix + batch)
    span = (seqlen_q, seqlen_k, causal_offset, prefix, left)
    first_row = top_row + CONSUMER * QUERIES
    low, high = key_tiles(first_row, QUERIES, span, BLOCK_N, CAUSAL, COUNTED)
    if CAUSAL:  # tiles that only the later consumers of this program need: let them pass
        _, end = key_tiles(top_row, CONSUMERS * QUERIES, span, BLOCK_N, CAUSAL, COUNTED)
        rings = _let_pass(end - high, barriers, rings)
    stage_k, phase_k, stage_v, phase_v = rings

    # The first tile, alone.
    of_rows = bias[0]  # where each row's bias begins; of ALiBi the head's slope and each row's own key
    drawn = bias[0]
    if bias[0] is not None:
        of_rows = bias_rows(bias, batch, head_all % heads, first_row, seqlen_q, ROWS, UNIT, s_layout)
        drawn = start_bias(of_rows, (high - 1) * BLOCK_N, seqlen_k, BLOCK_N, ENDS)
    if bias[1] is not None:
        slope = gl.load(bias[1] + batch * bias[2] + head_all % heads) * 1.4426950408889634
        of_rows = (slope, first_row + seqlen_k - seqlen_q + gl.arange(0, ROWS, row_layout))
    slot = turn % STAGES_Q * CONSUMERS + CONSUMER
    mbarrier.wait(q_full.index(slot), turn // STAGES_Q & 1)
    mbarrier.wait(k_full.index(stage_k), phase_k)
    s = warpgroup_mma_wait(0, [start_scores(q_smem, slot, k_smem, stage_k)])
    mbarrier.arrive(k_empty.index(stage_k))
    stage_k, phase_k = advance(stage_k, phase_k, STAGES_K)
    s, scale_log2 = changed(s, scales, bias, drawn, of_rows, (high - 1) * BLOCK_N)
    if ENDS:
        s = mask_keys(s, (high - 1) * BLOCK_N, first_row, span, QUERIES, CAUSAL)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    p32, row_max, unused = softmax_step(s, row_max, scale_log2, HIDES, False, COLUMNS == 64 and not WIDE)
    row_sum = own_sums(p32)
    lost = gl.zeros_like(row_sum)
    if v_low is not None:
        o = no_wide_output(ROWS, COLUMNS, BLOCK_N)
    else:
        o = no_output(v_smem, ROWS)
    p = carried(p32, o, v_smem, v_low)

    # The others: one more with a mask where the diagonal may cross two tiles, then without, then those that a window begins in.
    state, rings = (p, o, row_max, row_sum, lost), (stage_k, phase_k, stage_v, phase_v)
    done = high - 1  # the tile that was done last
    if CAUSAL and not COUNTED:
        done -= 1
        state, rings = tile_step(
            done, slot, memory, v_low, barriers, scales, bias, of_rows, first_row, span, state, rings,
            True, CAUSAL, WRITE_LSE, LAZY,
        )  # fmt: skip
    elif CAUSAL and not ALIGNED:
        masked = gl.minimum((causal_offset % QUERIES != 0).to(gl.int32), done - low)
        for _ in range(masked):
            done -= 1
            state, rings = tile_step(
                done, slot, memory, v_low, barriers, scales, bias, of_rows, first_row, span, state, rings,
                True, CAUSAL, WRITE_LSE, LAZY,
            )  # fmt: skip
    whole = low
    if LEFT:
        last_begin = gl.maximum(first_row + QUERIES - 1 + seqlen_k - seqlen_q - left, 0)
        whole = gl.minimum((last_begin + BLOCK_N - 1) // BLOCK_N, done)
    for i in range(done - whole):
        state, rings = tile_step(
            done - 1 - i, slot, memory, v_low, barriers, scales, bias, of_rows, first_row, span, state, rings,
            False, CAUSAL, WRITE_LSE, LAZY,
        )  # fmt: skip
    if LEFT:
        for i in range(whole - low):
            state, rings = tile_step(
                whole - 1 - i, slot, memory, v_low, barriers, scales, bias, of_rows, first_row, span, state, rings,
                True, CAUSAL, WRITE_LSE, LAZY,
            )  # fmt: skip
    p, o, row_max, row_sum, lost = state
    stage_k, phase_k, stage_v, phase_v = rings
    if OWN_OUT:
        mbarrier.arrive(q_empty.index(slot))
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o = wait_for_output(start_values(p, o, v_smem, stage_v, v_low, STAGES_V))
    mbarrier.arrive(v_empty.index(stage_v))
    stage_v, phase_v = advance(stage_v, phase_v, STAGES_V)
    rings = (stage_k, phase_k, stage_v, phase_v)
    if LEFT:  # tiles that only the earlier consumers of this program need
        begin, _ = key_tiles(top_row, CONSUMERS * QUERIES, span, BLOCK_N, CAUSAL, COUNTED)
        rings = _let_pass(low - begin, barriers, rings)

    # A row that sees no key has a sum of 0: its output is 0 and its log-sum-exp log(0) = -inf.
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
    if scales[1] is not None and (WRITE_LSE or sinks is not None):
        row_max += 0.5 * scales[0]  # what ``capped`` leaves out
    inverse = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
    if sinks is not None:
        sinks_at = sinks + head_all % heads
        if HEADS > 1:
            sinks_at += gl.arange(0, ROWS, row_layout) // QUERIES
        row_max, row_sum, shrink = with_sink(gl.load(sinks_at), row_max, row_sum)
        inverse = shrink / gl.where(row_sum == 0.0, 1.0, row_sum)
    o = scale_rows(o, inverse)
    if v_low is not None:
        o = in_parts(o, o_descs[0].block_type.shape[-1])
    tma.store_wait(0)  # the copy of the last tile's output has left shared memory
    if PACKED:
        place = (head_all, sequence[1], seqlen_q)
    else:
        place = (head_all // heads, head_all % heads)  # type: ignore[assignment]  # not kept in a register over the loop
    if OWN_OUT:
        _store(o_descs, place, first_row, o, o_smem, CONSUMER)
    else:
        _store(o_descs, place, first_row, o, o_smem, slot)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(slot))
    if WRITE_LSE:
        row = gl.arange(0, ROWS, row_layout)
        shift = gl.where(row_max == float("-inf"), 0.0, row_max)
        lse = (shift + log2_of_sum(row_sum)) * 0.6931471805599453
        lse_at = lse_base + head_all.to(gl.int64) * lse_rows
        if PACKED:
            lse_at += sequence[1] - seqlen_q + (row // QUERIES).to(gl.int64) * lse_rows
            row = row % QUERIES
        row = first_row + row
        gl.store(lse_at + row, lse, mask=row < seqlen_q)
    return rings


@gluon.jit
def consume(
    output, memory, barriers, work,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, ALIGNED: gl.constexpr, EVEN_K: gl.constexpr,
    WRITE_LSE: gl.constexpr, OWN_OUT: gl.constexpr, DEAL: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 rows of every tile of queries that this program works on."""
    sizes, tiles, board, prefix, left, cache = work
    heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds = sizes
    QUERIES: gl.constexpr = memory[0][0].shape[-2]
    rings = first_stage() + first_stage()
    turn = gl.to_tensor(0)  # tiles of queries done so far
    if tiles is None:
        for step in range(steps_of_program(tiles_m, heads_all, pair_rounds, DEAL)):
            has_work, tile_m, head_all = piece(step, tiles_m, heads_all, pair_rounds, CAUSAL, DEAL)
            if has_work:
                rings = _attend(
                    output, memory, barriers, sizes, None, prefix, left, tile_m * (CONSUMERS * QUERIES), head_all, turn,
                    rings, CONSUMER, CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, UNIT,
                )  # fmt: skip
                turn += 1
    else:
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        head, batch, top_row, end_q, rows, keys = take(board, turn, one)
        while head >= 0:
            sequence = (batch, end_q, rows, keys)
            if CONSUMER == 0 or top_row + CONSUMER * QUERIES < rows:
                rings = _attend(
                    output, memory, barriers, sizes, sequence, prefix, left, top_row, head, turn,
                    rings, CONSUMER, CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, UNIT,
                )  # fmt: skip
            else:
                rings = _pass(
                    memory, barriers, sequence, causal_offset, prefix, left, top_row, turn, rings, CONSUMER, CONSUMERS, CAUSAL
                )
            turn += 1
            head, batch, top_row, end_q, rows, keys = take(board, turn, one)
    tma.store_wait(0)
