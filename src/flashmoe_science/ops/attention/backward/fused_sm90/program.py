"""dK and dV of a tile of keys, and what it adds to dQ of every query that sees it, in the turn of its keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashmoe_science.ops.attention.device.band import (
    KEYS,
    NONE,
    QUERIES,
    Packed,
    Sequence,
    band_of_keys,
    number_of_sequence,
    origin_of,
    seen_alone,
    sequence_at,
)
from flashmoe_science.ops.attention.device.tiles import accumulator_layout, as_matrix, coordinates
from flashmoe_science.ops.gluon_bridge import barrier, tma_add, tma_load, tma_store, tma_stored
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, make_barriers

SIZES = (
    "heads_kv", "group", "heads", "together", "seqlen_k", "tiles_m", "tiles_n", "offset",
    "begin", "batches", "total_q", "total_k",
)  # fmt: skip
_HALF = gl.constexpr(QUERIES.value // 2)  # queries of a product
_SLOTS, _HALVES = gl.constexpr(2), gl.constexpr(4)  # slots of dQ, and of dS of half a tile of queries


class Tensors(NamedTuple):
    """Of each tensor its TMA descriptor, or its tiles in shared memory."""

    q: Any  # [STAGES, 1, 1, QUERIES, D]
    dout: Any  # [STAGES, 1, 1, QUERIES, DV]
    lse: Any  # [STAGES, QUERIES]
    delta: Any  # [STAGES, QUERIES]
    k: Any  # [2, 1, 1, KEYS, D], then dK
    v: Any  # [2, 1, 1, KEYS, DV], then dV
    dq: Any  # [SLOTS, QUERIES, D], fp32


class Pipeline(NamedTuple):
    """The barriers of full and of empty stages."""

    full: Any
    empty: Any


class Barriers(NamedTuple):
    queries: Any  # Pipelines: of Q, dO and the numbers of their rows
    ds: Any
    dq: Any
    keys: Any


class Work(NamedTuple):
    """What a program works on: the ``nth`` tile of keys of a head, and of each query head that shares it ``count`` tiles of
    queries, from ``start`` on by ``stride``, 1 or -1; from ``whole`` on every query sees all of the keys. Of windows and packed
    sequences (band.py) keys, queries and their tiles are a sequence's, ``tiles_m`` excepted."""

    batch: Any
    head: Any  # of keys, in its batch
    first_head: Any  # of queries, over all batches
    group: Any
    nth: Any
    seqlen_k: Any
    offset: Any  # query i sees keys up to i + offset
    tiles_m: Any  # of a head's sums over rows
    tiles_n: Any
    count: Any
    start: Any
    stride: Any
    whole: Any
    beyond: Any = NONE  # of a window: before it every query sees all of the keys
    begin: Any = NONE  # of a window: query i sees keys from i + begin on
    sequence: Any = NONE
    first_row: Any = NONE  # of a sequence, among a head's sums over rows; None of what is neither


@gluon.jit
def _steps(work):
    """Tiles of queries of all heads of the group."""
    return work.count * work.group


@gluon.jit
def _place(work, step):
    """The head of the group and the tile of queries of a step: a head after the other, so that a tile of queries, and what is
    summed for it, is in L2 when the next tile of keys comes to it."""
    return step // work.count, work.start + step % work.count * work.stride


@gluon.jit
def _first_row(work):
    """Where a sequence's rows begin among a head's sums over rows."""
    return 0 if work.first_row is None else work.first_row


@gluon.jit
def _turn(work, tile):
    """How many tiles of keys add to dQ of a tile of queries before this one: of a rising set those after it that the queries
    see, each of which has a lower number. Those that a window's left hides from them are all before it."""
    last = gl.minimum((tile * QUERIES + QUERIES - 1 + work.offset) // (2 * KEYS), work.tiles_n - 1)
    return gl.where(work.stride > 0, last - work.nth, work.nth)


@gluon.jit
def _load(descs, smem, barriers, work):
    """The producer: Q, dO and the numbers of their rows, a tile of queries a stage."""
    STAGES: gl.constexpr = smem.q.shape[0]
    state = first_stage()
    for step in range(_steps(work)):
        one, tile = _place(work, step)
        origin = origin_of(None if work.first_row is None else work.sequence.queries, work.batch, work.head * work.group + one)
        row = tile * QUERIES
        number = (work.first_head + one) * (work.tiles_m * QUERIES) + row + _first_row(work)
        mbarrier.wait(barriers.queries.empty.index(state.stage), state.phase ^ 1)
        full = barriers.queries.full.index(state.stage)
        mbarrier.expect(full, descs.q.block_type.nbytes + descs.dout.block_type.nbytes + 8 * QUERIES)
        tma_load(descs.q, coordinates(origin, row, 0), full, smem.q.index(state.stage))
        tma_load(descs.lse, [number], full, smem.lse.index(state.stage))
        tma_load(descs.dout, coordinates(origin, row, 0), full, smem.dout.index(state.stage))
        tma_load(descs.delta, [number], full, smem.delta.index(state.stage))
        state = advance(state, STAGES)


@gluon.jit
def _half(
    step, tile, dk, dv, k, smem, ds_smem, barriers, work, scale, PART: gl.constexpr, HALF: gl.constexpr, MASKS: gl.constexpr
):  # fmt: skip
    """dK and dV with half a tile of queries added, whose dS goes to shared memory. dV is started before dP is waited for: the
    assembler would else move that wait above all of the exponentials. A branch round the mask alone: of one with a product in
    each arm, ptxas 12.8 left a descriptor unwritten in one."""
    STAGES: gl.constexpr = smem.q.shape[0]
    layout: gl.constexpr = accumulator_layout(_HALF)
    stage = step % STAGES
    q = as_matrix(smem.q, stage).slice(HALF * _HALF, _HALF, 0)  # [HALF, D]
    dout = as_matrix(smem.dout, stage).slice(HALF * _HALF, _HALF, 0)  # [HALF, DV]
    zeros = gl.zeros([KEYS, _HALF], gl.float32, layout)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [KEYS, HALF]
    dp = warpgroup_mma(as_matrix(smem.v, PART), dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    lse = smem.lse.index(stage).slice(HALF * _HALF, _HALF, 0).load(gl.SliceLayout(0, layout))
    p = gl.exp2(s * scale - lse[None, :])
    if MASKS:
        masked = tile < work.whole
        if work.beyond is not None:
            masked |= tile >= work.beyond
        if masked:
            key = work.nth * (2 * KEYS) + PART * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
            if work.first_row is None:
                last = tile * QUERIES + HALF * _HALF + gl.arange(0, _HALF, gl.SliceLayout(0, layout)) + work.offset
                p = gl.where(gl.minimum(last, work.seqlen_k - 1)[None, :] >= key[:, None], p, 0.0)
            else:
                p = seen_alone(p, key, tile * QUERIES + HALF * _HALF, work.sequence, work.begin)
    operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    dv = warpgroup_mma(gl.convert_layout(p.to(smem.dout.dtype), operand), dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp])
    delta = smem.delta.index(stage).slice(HALF * _HALF, _HALF, 0).load(gl.SliceLayout(0, layout))
    ds = (p * (dp - delta[None, :])).to(smem.q.dtype)
    dk = warpgroup_mma(gl.convert_layout(ds, operand), q, dk, is_async=True)
    number = step * 2 + HALF
    slot = number % _HALVES
    here = ds_smem.index(slot * 2 + PART)
    mbarrier.wait(barriers.ds.empty.index(slot), number // _HALVES & 1 ^ 1)
    here.store(ds)
    fence_async_shared()
    mbarrier.arrive(barriers.ds.full.index(slot))
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    return dk, dv


@gluon.jit
def _step(step, tile, dk, dv, k, smem, ds_smem, barriers, work, scale, PART: gl.constexpr, MASKS: gl.constexpr):
    """dK and dV with a tile of queries added."""
    STAGES: gl.constexpr = smem.q.shape[0]
    mbarrier.wait(barriers.queries.full.index(step % STAGES), step // STAGES & 1)
    for half in gl.static_range(2):
        dk, dv = _half(step, tile, dk, dv, k, smem, ds_smem, barriers, work, scale, PART, half, MASKS)
    mbarrier.arrive(barriers.queries.empty.index(step % STAGES))
    return dk, dv


@gluon.jit
def _consume(descs, smem, ds_smem, barriers, work, scale, PART: gl.constexpr, MASKS: gl.constexpr):
    """A consumer: KEYS keys."""
    D: gl.constexpr = smem.k.shape[-1]
    DV: gl.constexpr = smem.v.shape[-1]
    dk = gl.zeros([KEYS, D], gl.float32, accumulator_layout(D))
    dv = gl.zeros([KEYS, DV], gl.float32, accumulator_layout(DV))
    log2 = scale * 1.4426950408889634
    mbarrier.wait(barriers.keys, 0)
    k = as_matrix(smem.k, PART).load(gl.DotOperandLayout(0, accumulator_layout(_HALF), 2))
    for step in range(_steps(work)):
        _, tile = _place(work, step)
        dk, dv = _step(step, tile, dk, dv, k, smem, ds_smem, barriers, work, log2, PART, MASKS)
    last = _steps(work) * 2 - 1
    if last > 0:  # dK goes by way of the memory of K, which the last product for dQ reads
        mbarrier.wait(barriers.ds.empty.index(last % _HALVES), last // _HALVES & 1)
    barrier()
    as_matrix(smem.k, PART).store((dk * scale).to(smem.k.dtype))
    as_matrix(smem.v, PART).store(dv.to(smem.v.dtype))
    fence_async_shared()
    barrier()
    origin = origin_of(None if work.first_row is None else work.sequence.every_key, work.batch, work.head)
    row = work.nth * (2 * KEYS) + PART * KEYS
    tma_store(descs.k, coordinates(origin, row, 0), smem.k.index(PART))
    tma_store(descs.v, coordinates(origin, row, 0), smem.v.index(PART))
    tma.store_wait(0)


@gluon.jit
def _multiply(smem, ds_smem, barriers, work):
    """dS^T K of a tile of queries after the other, without the scale."""
    D: gl.constexpr = smem.k.shape[-1]
    zeros = gl.zeros([_HALF, D], gl.float32, accumulator_layout(D))
    mbarrier.wait(barriers.keys, 0)
    for step in range(_steps(work)):
        slot = step % _SLOTS
        for half in gl.static_range(2):
            number = step * 2 + half
            place = number % _HALVES
            mbarrier.wait(barriers.ds.full.index(place), number // _HALVES & 1)
            dq = zeros
            for part in gl.static_range(2):
                ds = ds_smem.index(place * 2 + part).permute((1, 0))  # [HALF, KEYS]
                dq = warpgroup_mma(ds, as_matrix(smem.k, part), dq, use_acc=part > 0, is_async=True)
            dq = warpgroup_mma_wait(0, [dq])
            mbarrier.arrive(barriers.ds.empty.index(place))
            if half == 0:
                mbarrier.wait(barriers.dq.empty.index(slot), step // _SLOTS & 1 ^ 1)
            smem.dq.index(slot).slice(half * _HALF, _HALF, 0).store(dq)
        fence_async_shared()
        mbarrier.arrive(barriers.dq.full.index(slot))


@gluon.jit
def _relay(dq_desc, dq_smem, barriers, work, turns, SLOT: gl.constexpr):
    """Adds what is in a slot to dQ, in global memory, once the tiles of keys before this one have added theirs."""
    full, empty = barriers.dq.full.index(SLOT), barriers.dq.empty.index(SLOT)
    phase = gl.to_tensor(0)
    for step in range(SLOT, _steps(work), _SLOTS):
        one, tile = _place(work, step)
        number = (work.first_head + one) * work.tiles_m + tile + _first_row(work) // QUERIES
        row, counter, turn = number * QUERIES, turns + number, _turn(work, tile)
        while gl.atomic_add(counter, 0, sem="acquire") != turn:
            pass
        mbarrier.wait(full, phase)
        if turn == 0:
            tma_store(dq_desc, [row, 0], dq_smem.index(SLOT))
        else:
            tma_add(dq_desc, [row, 0], dq_smem.index(SLOT))
        tma_stored()
        barrier()
        gl.atomic_add(counter, 1, sem="release")
        mbarrier.arrive(empty)
        phase ^= 1


@gluon.jit(do_not_specialize=SIZES)
def flashmoe_bwd_fused_gluon_sm90(
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc, turns,
    cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale,
    heads_kv, group, heads, together, seqlen_k, tiles_m, tiles_n, offset, begin, batches, total_q, total_k,
    STAGES: gl.constexpr, MASKS: gl.constexpr, BANDED: gl.constexpr, CONSUMER_REGS: gl.constexpr,
    MULTIPLIER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """A program for each tile of keys of ``heads`` heads of keys, in the order in which programs start: of a set of heads in
    turns, ``together`` of them, in the order in which they add to dQ, so that a program waits for one that has started, and the
    first that has not ended waits for none. Of a rising set the last keys begin, of others the first (kernel.py). BANDED: of
    windows and packed sequences all sets rise, through the sequences from the last to the first; a program waits for those of
    its own sequence. Tiles that no query sees add to none, and none counts them."""
    ticket = turns + heads * group * tiles_m
    number = gl.atomic_add(ticket, 1, sem="relaxed")
    nth_set = number // (tiles_n * together)
    last_set = (heads - 1) // together
    rising = ((last_set - nth_set) % 2 == 1) | ((nth_set == 0) & (last_set > 0))
    first = nth_set * together
    together = gl.minimum(heads - first, together)
    number -= first * tiles_n
    head, nth = first + number % together, number // together
    if BANDED:
        nth = tiles_n - 1 - nth
        sequence = Sequence(tiles_m, seqlen_k, offset)
        if cu_seqlens_k is not None:
            packed = Packed(cu_seqlens_q, cu_seqlens_k, seqused_k, batches, total_q, total_k)
            sequence = sequence_at(packed, number_of_sequence(cu_seqlens_k, batches, nth, 2 * KEYS), offset, 2 * KEYS)
            nth -= sequence.first_tile
            if begin is not None:
                begin += sequence.diagonal
        first_key = nth * (2 * KEYS)
        band = band_of_keys(sequence, begin, first_key, QUERIES, 2 * KEYS)
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
        low = gl.minimum(gl.maximum(first_key - offset, 0) // QUERIES, tiles_m)
        whole = tiles_m
        if MASKS:
            whole = (gl.maximum(first_key + (2 * KEYS - 1) - offset, 0) + QUERIES - 1) // QUERIES
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
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], lse_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [2] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [2] + v_desc.block_type.shape, v_desc.layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [_SLOTS] + dq_desc.block_type.shape, dq_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, _HALF], q_desc.dtype)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [_HALVES * 2, KEYS, _HALF], ds_layout)
    queries_full, queries_empty = make_barriers(STAGES, 2)
    ds_full, ds_empty = make_barriers(_HALVES, 1, 2)
    dq_full, dq_empty = make_barriers(_SLOTS, 1)
    keys = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys, count=1)
    fence_async_shared()
    mbarrier.expect(keys, (k_desc.block_type.nbytes + v_desc.block_type.nbytes) * 2)
    origin = origin_of(of_keys, work.batch, work.head)
    for part in gl.static_range(2):
        tma_load(k_desc, coordinates(origin, first_key + part * KEYS, 0), keys, k_smem.index(part))
        tma_load(v_desc, coordinates(origin, first_key + part * KEYS, 0), keys, v_smem.index(part))

    smem = Tensors(q_smem, dout_smem, lse_smem, delta_smem, k_smem, v_smem, dq_smem)
    sources = Tensors(q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc, dq_desc)
    results = Tensors(q_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc)
    barriers = Barriers(
        Pipeline(queries_full, queries_empty), Pipeline(ds_full, ds_empty), Pipeline(dq_full, dq_empty), keys
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (results, smem, ds_smem, barriers, work, softmax_scale, 0, MASKS)),
            (_consume, (results, smem, ds_smem, barriers, work, softmax_scale, 1, MASKS)),
            (_multiply, (smem, ds_smem, barriers, work)),
            (_load, (sources, smem, barriers, work)),
            (_relay, (dq_desc, dq_smem, barriers, work, turns, 0)),
            (_relay, (dq_desc, dq_smem, barriers, work, turns, 1)),
        ],
        [4, 4, 1, 1, 1],
        [CONSUMER_REGS, MULTIPLIER_REGS, PRODUCER_REGS, PRODUCER_REGS, PRODUCER_REGS],
    )  # fmt: skip
