"""dK and dV of a tile of keys, and what it adds to dQ of every query that sees it, in the turn of its keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from flashmoe_science.ops.attention.backward.fused_sm90.narrow import HALVES, consume_narrow, multiply
from flashmoe_science.ops.attention.backward.fused_sm90.wide import consume_wide
from flashmoe_science.ops.attention.backward.fused_sm90.work import (
    PRODUCT,
    SLOTS,
    Barriers,
    Pipeline,
    Tensors,
    Work,
    first_row_of,
    place_of,
    steps_of,
)
from flashmoe_science.ops.attention.device.band import (
    KEYS,
    QUERIES,
    Packed,
    Sequence,
    band_of_keys,
    number_of_sequence,
    origin_of,
    sequence_at,
)
from flashmoe_science.ops.attention.device.tiles import coordinates
from flashmoe_science.ops.attention.device.wide import descriptor_of
from flashmoe_science.ops.gluon_bridge import barrier, tma_add, tma_load, tma_store, tma_stored
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, make_barriers, make_row

# Tiles of keys of a set of heads, near as many as SMs: what more work on, L2 does not hold.
TOGETHER = gl.constexpr(128)
SIZES = (
    "heads_kv", "group", "heads", "seqlen_k", "tiles_m", "tiles_n", "offset",
    "begin", "batches", "total_q", "total_k",
)  # fmt: skip


@gluon.jit
def _turn(work, tile, BLOCK_M: gl.constexpr):
    """How many tiles of keys add to dQ of a tile of queries before this one: of a rising set those after it that the queries
    see, each of which has a lower number. Those that a window's left hides from them are all before it."""
    last = gl.minimum((tile * BLOCK_M + BLOCK_M - 1 + work.offset) // (2 * KEYS), work.tiles_n - 1)
    return gl.where(work.stride > 0, last - work.nth, work.nth)


@gluon.jit
def _load(descs, smem, barriers, work):
    """The producer: Q, dO and the numbers of their rows, a tile of queries a stage."""
    STAGES: gl.constexpr = smem.q.shape[0]
    BLOCK_M: gl.constexpr = smem.q.shape[-2]
    state = first_stage()
    for step in range(steps_of(work)):
        one, tile = place_of(work, step)
        origin = origin_of(None if work.first_row is None else work.sequence.queries, work.batch, work.head * work.group + one)
        row = tile * BLOCK_M
        number = (work.first_head + one) * (work.tiles_m * BLOCK_M) + row + first_row_of(work)
        mbarrier.wait(barriers.queries.empty.index(state.stage), state.phase ^ 1)
        full = barriers.queries.full.index(state.stage)
        mbarrier.expect(full, descs.q.block_type.nbytes + descs.dout.block_type.nbytes + 8 * BLOCK_M)
        tma_load(descs.q, coordinates(origin, row, 0), full, smem.q.index(state.stage))
        tma_load(descs.lse, [number], full, smem.lse.index(state.stage))
        tma_load(descs.dout, coordinates(origin, row, 0), full, smem.dout.index(state.stage))
        tma_load(descs.delta, [number], full, smem.delta.index(state.stage))
        state = advance(state, STAGES)


@gluon.jit
def _rows_of(parts, PART: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Rows of a part and of those after it."""
    ROWS: gl.constexpr = parts.shape[1]
    return parts.index(PART + FIRST // ROWS).slice(FIRST % ROWS, COUNT, 0)


@gluon.jit
def _relay(dq_desc, dq_smem, barriers, work, turns, SLOT: gl.constexpr, BLOCK_M: gl.constexpr):
    """Adds what is in a slot to dQ, in global memory, once the tiles of keys before this one have added theirs: two parts of 64
    columns, or where columns of a second slice (columns.py) fill half of the second part or less, copies of half a part."""
    ROWS: gl.constexpr = dq_smem.shape[1]
    COPY: gl.constexpr = dq_desc.block_type.shape[0]  # rows
    COPIES: gl.constexpr = 2 if COPY == ROWS else 3
    if BLOCK_M == PRODUCT:  # full with dS of the next step (wide.py)
        full, phase = barriers.ds.full.index(1 - SLOT), gl.to_tensor(SLOT)
        if SLOT == 1 and steps_of(work) > 1:  # a phase that is missed would come again
            mbarrier.wait(full, 0)  # of the first step
            mbarrier.arrive(barriers.dq.empty.index(SLOT))
    else:
        full, phase = barriers.dq.full.index(SLOT), gl.to_tensor(0)
    empty = barriers.dq.empty.index(SLOT)
    for step in range(SLOT, steps_of(work), SLOTS):
        one, tile = place_of(work, step)
        number = (work.first_head + one) * work.tiles_m + tile + first_row_of(work) // BLOCK_M
        row, counter, turn = number * (2 * ROWS), turns + number, _turn(work, tile, BLOCK_M)
        while gl.atomic_add(counter, 0, sem="acquire") != turn:
            pass
        mbarrier.wait(full, phase)
        for n in gl.static_range(COPIES):
            if turn == 0:
                tma_store(dq_desc, [row + n * COPY, 0], _rows_of(dq_smem, SLOT * 2, n * COPY, COPY))
            else:
                tma_add(dq_desc, [row + n * COPY, 0], _rows_of(dq_smem, SLOT * 2, n * COPY, COPY))
        tma_stored()
        barrier()
        gl.atomic_add(counter, 1, sem="release")
        mbarrier.arrive(empty)
        phase ^= 1


@gluon.jit(do_not_specialize=SIZES)
def flashmoe_bwd_fused_gluon_sm90(
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc, turns,
    cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale,
    heads_kv, group, heads, seqlen_k, tiles_m, tiles_n, offset, begin, batches, total_q, total_k,
    STAGES: gl.constexpr, MASKS: gl.constexpr, BANDED: gl.constexpr, CONSUMER_REGS: gl.constexpr,
    MULTIPLIER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr, SECOND_QK: gl.constexpr, SECOND_V: gl.constexpr,
):  # fmt: skip
    """A program for each tile of keys of ``heads`` heads of keys, in the order in which programs start: of a set of heads,
    ``together`` of them, in turns, in the order in which they add to dQ. So a program waits for one that has started, and the
    first that has not ended waits for none. Of a rising set the last keys begin, of others the first (kernel.py). BANDED: of
    windows and packed sequences all sets rise. Of packed ones all heads of the longest sequence come first, in sets of their
    own, and a program waits for those of its own sequence. Tiles that no query sees add to none, and none counts them."""
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[-2]
    WIDE: gl.constexpr = BLOCK_M == PRODUCT
    ticket = turns + heads * group * tiles_m
    number = gl.atomic_add(ticket, 1, sem="relaxed")
    tiles = tiles_n
    if cu_seqlens_k is not None:
        order = ticket + 1  # of sequences (rows.py)
        rank = number_of_sequence(order, batches, number // heads, 2 * KEYS)
        place = gl.load(order + batches + 1 + rank)
        number -= (gl.load(order + rank) // (2 * KEYS) + rank) * heads
        packed = Packed(cu_seqlens_q, cu_seqlens_k, seqused_k, batches, total_q, total_k)
        sequence = sequence_at(packed, place, offset, 2 * KEYS)
        tiles = sequence.every_key.end // (2 * KEYS) + place + 1 - sequence.first_tile
    together = gl.maximum(TOGETHER // tiles, 1)
    nth_set = number // (tiles * together)
    last_set = (heads - 1) // together
    rising = ((last_set - nth_set) % 2 == 1) | ((nth_set == 0) & (last_set > 0))
    first = nth_set * together
    together = gl.minimum(heads - first, together)
    number -= first * tiles
    head, nth = first + number % together, number // together
    if BANDED:
        nth = tiles - 1 - nth
        if cu_seqlens_k is None:
            sequence = Sequence(tiles_m // (QUERIES // BLOCK_M), seqlen_k, offset)
        elif begin is not None:
            begin += sequence.diagonal
        first_key = nth * (2 * KEYS)
        band = band_of_keys(sequence, begin, first_key, BLOCK_M, 2 * KEYS, BLOCK_M)
        tiles_n = (sequence.seqlen_k + 2 * KEYS - 1) // (2 * KEYS)
        work = Work(
            head // heads_kv, head % heads_kv, head * group, group, nth, sequence.seqlen_k, sequence.offset, tiles_m, tiles_n,
            band.high - band.low, band.low, 1, band.whole, None if begin is None else band.beyond, begin, sequence,
            0 if sequence.first_row is None else sequence.first_row,
        )  # fmt: skip
        of_keys = sequence.keys
    else:
        nth = gl.where(rising, tiles_n - 1 - nth, nth)
        first_key = nth * (2 * KEYS)
        low = gl.minimum(gl.maximum(first_key - offset, 0) // BLOCK_M, tiles_m)
        whole = tiles_m
        if MASKS:
            whole = (gl.maximum(first_key + (2 * KEYS - 1) - offset, 0) + BLOCK_M - 1) // BLOCK_M
            whole = gl.where(first_key + 2 * KEYS > seqlen_k, tiles_m, gl.minimum(gl.maximum(whole, low), tiles_m))
        else:
            whole = low
        batch, place = head // heads_kv, head % heads_kv
        start, stride = gl.where(rising, low, tiles_m - 1), gl.where(rising, 1, -1)
        span = (tiles_m - low, start, stride, whole)
        work = Work(batch, place, head * group, group, nth, seqlen_k, offset, tiles_m, tiles_n, *span)
        of_keys = None

    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    dout_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + dout_desc.block_type.shape, dout_desc.layout)
    q_low, dout_low = None, None
    if SECOND_QK:
        barrier()  # what the program's number came by is read
        q_low = descriptor_of(q_smem)
    if SECOND_V:
        barrier()
        dout_low = descriptor_of(dout_smem)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [2] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [2] + v_desc.block_type.shape, v_desc.layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [SLOTS * 2, PRODUCT // 2, 128], dq_desc.layout)
    PLACES: gl.constexpr = SLOTS if WIDE else HALVES
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, PRODUCT], q_desc.dtype)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [PLACES * 2, KEYS, PRODUCT], ds_layout)
    queries_full, queries_empty = make_barriers(STAGES, 2)
    if WIDE:
        ds_full, dq_empty = make_row(PLACES, 2), make_row(SLOTS, 1)
        ds, dq = Pipeline(ds_full, ds_full), Pipeline(dq_empty, dq_empty)  # neither has the other row (wide.py)
    else:
        ds, dq = Pipeline(*make_barriers(PLACES, 1, 2)), Pipeline(*make_barriers(SLOTS, 1))
    keys = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys, count=1)
    fence_async_shared()
    mbarrier.expect(keys, (k_desc.block_type.nbytes + v_desc.block_type.nbytes) * 2)
    origin = origin_of(of_keys, work.batch, work.head)
    for part in gl.static_range(2):
        tma_load(k_desc, coordinates(origin, first_key + part * KEYS, 0), keys, k_smem.index(part))
        tma_load(v_desc, coordinates(origin, first_key + part * KEYS, 0), keys, v_smem.index(part))

    smem = Tensors(q_smem, dout_smem, lse_smem, delta_smem, k_smem, v_smem, ds_smem, dq_smem, q_low, dout_low)
    sources = Tensors(q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc, None, dq_desc)
    results = Tensors(q_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc, None, dq_desc)
    barriers = Barriers(Pipeline(queries_full, queries_empty), ds, dq, keys)
    if WIDE:
        gl.warp_specialize(
            [
                (consume_wide, (results, smem, barriers, work, softmax_scale, 0, SECOND_QK, SECOND_V, MASKS)),
                (consume_wide, (results, smem, barriers, work, softmax_scale, 1, SECOND_QK, SECOND_V, MASKS)),
                (_load, (sources, smem, barriers, work)),
                (_relay, (dq_desc, dq_smem, barriers, work, turns, 0, BLOCK_M)),
                (_relay, (dq_desc, dq_smem, barriers, work, turns, 1, BLOCK_M)),
            ],
            [4, 1, 1, 1],
            [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume_narrow, (results, smem, barriers, work, softmax_scale, 0, MASKS)),
                (consume_narrow, (results, smem, barriers, work, softmax_scale, 1, MASKS)),
                (multiply, (smem, barriers, work)),
                (_load, (sources, smem, barriers, work)),
                (_relay, (dq_desc, dq_smem, barriers, work, turns, 0, BLOCK_M)),
                (_relay, (dq_desc, dq_smem, barriers, work, turns, 1, BLOCK_M)),
            ],
            [4, 4, 1, 1, 1],
            [CONSUMER_REGS, MULTIPLIER_REGS, PRODUCER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )  # fmt: skip
