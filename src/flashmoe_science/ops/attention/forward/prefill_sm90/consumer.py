"""A consumer of fwd_gluon_sm90: a warpgroup that attends 64 rows of each tile of queries to its keys, and writes O and LSE.

``_attend`` names the builds in which rescaling of O is conditional (device/output.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from flashmoe_science.ops.attention.device.bias import alibi_rows, bias_rows, load_bias
from flashmoe_science.ops.attention.device.kv_pipeline import RowState, first_kv, release_k, release_v, skip_tiles, start_values
from flashmoe_science.ops.attention.device.mask import MaskBounds, mask_keys
from flashmoe_science.ops.attention.device.output import LAZY_ABOVE, no_output, scale_rows, wait_for_output
from flashmoe_science.ops.attention.device.softcap import uncapped_max
from flashmoe_science.ops.attention.device.softmax import log_sum_exp, normalizer, own_sums, softmax_step
from flashmoe_science.ops.attention.device.tiles import Origin, RaggedOrigin, accumulator_layout, coordinates, start_scores
from flashmoe_science.ops.attention.device.wide import in_parts, no_wide_output
from flashmoe_science.ops.attention.forward.prefill_sm90.arguments import Sequence
from flashmoe_science.ops.attention.forward.prefill_sm90.schedule import key_tiles, steps_of_program, tile_at
from flashmoe_science.ops.attention.forward.prefill_sm90.step import ScoreMods, apply_score_mods, probabilities, tile_step
from flashmoe_science.ops.gluon_bridge import tma_store
from flashmoe_science.ops.pipeline_gluon import receive


@gluon.jit
def _store(o_descs, origin, row, o, o_smem, stage):
    """Start the copies of all parts of O to device memory, by way of shared memory that holds nothing else."""
    out = o_smem[0].index(stage)  # [..., rows, width]
    out.reshape(o[0].shape).store(o[0].to(o_smem[0].dtype))
    if len(o) == 2:
        rest = o_smem[1].index(stage)
        rest.reshape(o[1].shape).store(o[1].to(o_smem[1].dtype))
    fence_async_shared()
    tma_store(o_descs[0], coordinates(origin, row, 0), out)
    if len(o) == 2:
        tma_store(o_descs[1], coordinates(origin, row, o[0].shape[1]), rest)


@gluon.jit
def _skip_query_tile(buffers, barriers, work, sequence, top_row, iteration, kv, CONSUMER: gl.constexpr, TRAITS: gl.constexpr):
    """``_attend`` of a sequence's last tile of queries for a consumer whose rows would all be past the end: it consumes
    and releases Q, K and V without computing. The tensor cores are the others' alone."""
    QUERIES: gl.constexpr = buffers.q[0].shape[-2]
    BLOCK_N: gl.constexpr = buffers.k[0].shape[-2]
    STAGES_Q: gl.constexpr = barriers.q_full.shape[0] // TRAITS.CONSUMERS
    q_stage = iteration % STAGES_Q * TRAITS.CONSUMERS + CONSUMER
    mbarrier.wait(barriers.q_full.index(q_stage), iteration // STAGES_Q & 1)
    mbarrier.arrive(barriers.q_empty.index(q_stage))
    diagonal = sequence.seqlen_k - sequence.seqlen_q + work.sizes.causal_offset
    prefix = work.prefix
    if prefix is not None:
        prefix = gl.load(prefix + sequence.batch)
    bounds = MaskBounds(sequence.seqlen_q, sequence.seqlen_k, diagonal, prefix, work.left)
    low, high = key_tiles(top_row, TRAITS.CONSUMERS * QUERIES, bounds, BLOCK_N, TRAITS.CAUSAL)
    return skip_tiles(high - low, barriers, kv)


@gluon.jit
def _write(
    output, buffers, barriers, sequence, bounds, lse_rows, first_row, head_all, heads, o, row_max, row_sum, q_stage,
    CONSUMER: gl.constexpr, TRAITS: gl.constexpr,
):  # fmt: skip
    """Write O and the log-sum-exp of a consumer's rows, of ``row_sum`` [BLOCK_M, 4]."""
    HEADS: gl.constexpr = buffers.q[0].shape[-3]
    QUERIES: gl.constexpr = buffers.q[0].shape[-2]
    ROWS: gl.constexpr = HEADS * QUERIES
    row_layout: gl.constexpr = row_max.type.layout
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)  # [BLOCK_M]
    if TRAITS.WRITE_LSE or output.sinks is not None:
        row_max = uncapped_max(row_max, output.scales)
    sink = output.sinks
    if output.sinks is not None:
        sinks_at = output.sinks + head_all % heads
        if HEADS > 1:
            sinks_at += gl.arange(0, ROWS, row_layout) // QUERIES
        if sequence is not None:
            sink = gl.load(sinks_at, mask=sequence.end_q >= 0, other=float("-inf"))  # below 0: of the rest, which has no sink
            end_q = gl.maximum(sequence.end_q, -sequence.end_q)
            sequence = Sequence(sequence.batch, end_q, sequence.seqlen_q, sequence.seqlen_k)
        else:
            sink = gl.load(sinks_at)
    row_max, row_sum, scale = normalizer(row_max, row_sum, sink)
    o = scale_rows(o, scale)
    if output.v_low is not None:
        o = in_parts(o, output.descs[0].block_type.shape[-1])
    tma.store_wait(0)  # the copy of the last tile's output has left shared memory
    if sequence is not None:
        origin = RaggedOrigin(head_all, sequence.end_q, bounds.seqlen_q)
    else:
        # Not kept in a register over the loop.
        origin = Origin((head_all // heads, head_all % heads))  # type: ignore[assignment]
    if TRAITS.OWN_OUT:
        _store(output.descs, origin, first_row, o, buffers.o, CONSUMER)
    else:
        _store(output.descs, origin, first_row, o, buffers.o, q_stage)
        tma.store_wait(0)
        mbarrier.arrive(barriers.q_empty.index(q_stage))
    if TRAITS.WRITE_LSE:
        row = gl.arange(0, ROWS, row_layout)  # [BLOCK_M]
        lse = log_sum_exp(row_max, row_sum)
        lse_at = output.lse + head_all.to(gl.int64) * lse_rows
        if sequence is not None:
            lse_at += sequence.end_q - bounds.seqlen_q + (row // QUERIES).to(gl.int64) * lse_rows
            row = row % QUERIES
        row = first_row + row
        gl.store(lse_at + row, lse, mask=row < bounds.seqlen_q)


@gluon.jit
def _attend(
    output, buffers, barriers, work, sequence, top_row, head_all, iteration, kv, CONSUMER: gl.constexpr, TRAITS: gl.constexpr
):  # fmt: skip
    """Attend a consumer's 64 rows of a tile of queries to their keys, of ``head_all`` and, of packed sequences, of heads after
    it that share its keys. ``sequence``: a Sequence of packed ones, else None. Returns the KVState after it."""
    scales, v_low, bias, heads = output.scales, output.v_low, output.bias, work.sizes.heads
    QUERIES: gl.constexpr = buffers.q[0].shape[-2]
    ROWS: gl.constexpr = buffers.q[0].shape[-3] * QUERIES
    CONSUMERS: gl.constexpr = TRAITS.CONSUMERS
    CAUSAL: gl.constexpr = TRAITS.CAUSAL
    STAGES_Q: gl.constexpr = buffers.q[0].shape[0] // CONSUMERS
    BLOCK_N: gl.constexpr = buffers.k[0].shape[-2]
    s_layout: gl.constexpr = accumulator_layout(BLOCK_N)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    # Conditional rescaling where it measured faster: of 64 columns for one consumer alone, of more always, and in the wide form
    # of fewer where a mask leaves less to hide behind.
    WIDE: gl.constexpr = v_low is not None
    COLUMNS: gl.constexpr = output.descs[0].block_type.shape[-1] + (output.descs[1].block_type.shape[-1] if WIDE else 0)
    NARROW: gl.constexpr = COLUMNS == LAZY_ABOVE and CONSUMERS == 1 and BLOCK_N == 128 and CAUSAL
    LAZY: gl.constexpr = COLUMNS > LAZY_ABOVE or NARROW or (WIDE and CAUSAL)
    LEFT: gl.constexpr = work.left is not None
    ENDS: gl.constexpr = CAUSAL or not TRAITS.EVEN_K or LEFT  # whether the first tile needs a mask
    HIDES: gl.constexpr = ENDS or bias.base is not None  # whether it may hold no key that a row sees
    batch, seqlen_q, seqlen_k = head_all // heads, work.sizes.seqlen_q, work.sizes.seqlen_k
    diagonal = work.sizes.causal_offset
    if sequence is not None:
        batch, seqlen_q, seqlen_k = sequence.batch, sequence.seqlen_q, sequence.seqlen_k
        diagonal += seqlen_k - seqlen_q
    prefix = work.prefix
    if prefix is not None:
        prefix = gl.load(prefix + batch)
    bounds = MaskBounds(seqlen_q, seqlen_k, diagonal, prefix, work.left)
    first_row = top_row + CONSUMER * QUERIES
    low, high = key_tiles(first_row, QUERIES, bounds, BLOCK_N, CAUSAL)
    if CAUSAL:  # skip tiles that only the later consumers of this program need
        _, end = key_tiles(top_row, CONSUMERS * QUERIES, bounds, BLOCK_N, CAUSAL)
        kv = skip_tiles(end - high, barriers, kv)

    # The first tile, alone.
    rows = bias.base
    loaded = bias.base
    if bias.base is not None:
        rows = bias_rows(bias, batch, head_all % heads, first_row, bounds.seqlen_q, ROWS, TRAITS.UNIT, s_layout)
        loaded = load_bias(rows, (high - 1) * BLOCK_N, bounds.seqlen_k, BLOCK_N, ENDS)
    if bias.slopes is not None:
        slope_at = bias.slopes + batch * bias.stride_slopes + head_all % heads
        rows = alibi_rows(slope_at, first_row, bounds, ROWS, s_layout)
    mods = ScoreMods(scales, bias, rows, first_row, bounds)
    q_stage = iteration % STAGES_Q * CONSUMERS + CONSUMER
    mbarrier.wait(barriers.q_full.index(q_stage), iteration // STAGES_Q & 1)
    mbarrier.wait(barriers.k_full.index(kv.k.stage), kv.k.phase)
    s = warpgroup_mma_wait(0, [start_scores(buffers.q, q_stage, buffers.k, kv.k.stage)])  # [BLOCK_M, BLOCK_N]
    kv = release_k(barriers, kv)
    s, scale_log2 = apply_score_mods(s, mods, loaded, (high - 1) * BLOCK_N)
    if ENDS:
        s = mask_keys(s, (high - 1) * BLOCK_N, first_row, bounds, QUERIES, CAUSAL)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, row_layout)  # [BLOCK_M]
    p32, row_max, unused = softmax_step(s, row_max, scale_log2, HIDES, False, COLUMNS == 64 and not WIDE)
    row_sum = own_sums(p32)  # [BLOCK_M, 4]
    if WIDE:
        o = no_wide_output(ROWS, COLUMNS, BLOCK_N)
    else:
        o = no_output(buffers.v, ROWS)  # [BLOCK_M, width]
    state = RowState(probabilities(p32, o, buffers.v, v_low), o, row_max, row_sum, gl.zeros_like(row_sum))

    # The others: one more with a mask where the diagonal crosses two tiles, then without, then those that a window begins in.
    # That one is no loop of its own: from a loop to the next P would be unpacked, and packed in each of its steps.
    done = high - 1  # the tile that was done last
    if CAUSAL and not TRAITS.ALIGNED:
        if (first_row + bounds.diagonal < done * BLOCK_N) & (done > low):
            done -= 1
            state, kv = tile_step(done, q_stage, buffers, barriers, mods, v_low, state, kv, True, LAZY, TRAITS)
    whole = low
    if LEFT:
        last_begin = gl.maximum(first_row + QUERIES - 1 + bounds.seqlen_k - bounds.seqlen_q - bounds.left, 0)
        whole = gl.minimum((last_begin + BLOCK_N - 1) // BLOCK_N, done)
    for i in range(done - whole):
        state, kv = tile_step(done - 1 - i, q_stage, buffers, barriers, mods, v_low, state, kv, False, LAZY, TRAITS)
    if LEFT:
        for i in range(whole - low):
            state, kv = tile_step(whole - 1 - i, q_stage, buffers, barriers, mods, v_low, state, kv, True, LAZY, TRAITS)
    if TRAITS.OWN_OUT:
        mbarrier.arrive(barriers.q_empty.index(q_stage))
    mbarrier.wait(barriers.v_full.index(kv.v.stage), kv.v.phase)
    o = wait_for_output(start_values(state.p, state.o, buffers, barriers, kv, v_low))
    kv = release_v(barriers, kv)
    if LEFT:  # skip tiles that only the earlier consumers of this program need
        begin, _ = key_tiles(top_row, CONSUMERS * QUERIES, bounds, BLOCK_N, CAUSAL)
        kv = skip_tiles(low - begin, barriers, kv)
    _write(
        output, buffers, barriers, sequence, bounds, work.sizes.seqlen_q, first_row, head_all, heads, o, state.max, state.sum,
        q_stage, CONSUMER, TRAITS,
    )  # fmt: skip
    return kv


@gluon.jit
def consume(output, buffers, barriers, work, CONSUMER: gl.constexpr, TRAITS: gl.constexpr):
    """A consumer: 64 rows of every tile of queries that this program works on."""
    QUERIES: gl.constexpr = buffers.q[0].shape[-2]
    kv = first_kv()
    iteration = gl.to_tensor(0)  # tiles of queries done so far
    if work.tiles is None:
        for step in range(steps_of_program(work.sizes, TRAITS.SCHEDULE)):
            has_work, tile_m, head_all = tile_at(step, work.sizes, TRAITS.CAUSAL, TRAITS.SCHEDULE)
            if has_work:
                top_row = tile_m * (TRAITS.CONSUMERS * QUERIES)
                kv = _attend(output, buffers, barriers, work, None, top_row, head_all, iteration, kv, CONSUMER, TRAITS)
                iteration += 1
    else:
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        head, batch, top_row, end_q, rows, keys = receive(work.mailbox, iteration, one)
        while head >= 0:
            sequence = Sequence(batch, end_q, rows, keys)
            if CONSUMER == 0 or top_row + CONSUMER * QUERIES < rows:
                kv = _attend(output, buffers, barriers, work, sequence, top_row, head, iteration, kv, CONSUMER, TRAITS)
            else:
                kv = _skip_query_tile(buffers, barriers, work, sequence, top_row, iteration, kv, CONSUMER, TRAITS)
            iteration += 1
            head, batch, top_row, end_q, rows, keys = receive(work.mailbox, iteration, one)
    tma.store_wait(0)
