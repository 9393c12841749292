"""dK and dV of a tile of keys, and dS of it and every query that sees it, which goes to a workspace: the first kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from flashmoe_science.ops.attention.backward.columns import (
    keep,
    layout_of,
    load_kept,
    no_columns,
    put,
    scaled,
    start_columns,
    start_over_columns,
    wait_for_columns,
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
from flashmoe_science.ops.attention.device.softcap import Scales, capped, capped_scales
from flashmoe_science.ops.attention.device.tiles import as_matrix, coordinates, unfolded
from flashmoe_science.ops.gluon_bridge import barrier, tma_load, tma_store
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, make_barriers

SIZES = (
    "heads_kv", "group", "seqlen_k", "tiles_m", "offset", "first_head", "first_step", "end_step", "first_tile", "tiles_n",
    "band", "begin", "batches", "total_q", "total_k",
)  # fmt: skip
_SLOTS = gl.constexpr(2)  # of a consumer's dS: one is copied out while the next is made


class Tensors(NamedTuple):
    """Of each tensor its TMA descriptor, None of a result that is not asked for; or its tiles in shared memory."""

    q: Any  # [STAGES, 1, 1, BLOCK_M, D]
    dout: Any  # [STAGES, 1, 1, BLOCK_M, DV]
    lse: Any  # [STAGES, BLOCK_M]
    delta: Any  # [STAGES, BLOCK_M]
    k: Any  # [CONSUMERS, 1, 1, KEYS, D], then dK
    v: Any  # [CONSUMERS, 1, 1, KEYS, DV], then dV
    ds: Any  # [CONSUMERS * _SLOTS, KEYS, BLOCK_M]
    p: Any  # [KEYS, BLOCK_M], of a lone consumer alone, whose warps share rows: else it stays in registers


class Barriers(NamedTuple):
    full: Any
    empty: Any
    keys: Any


class Kept(NamedTuple):
    """What holds dK and dV from a wave to the next, or None: every step is in one wave. The row of the program's first key."""

    dk: Any
    dv: Any
    row: Any


class Second(NamedTuple):
    """Columns of the second slice of tiles, and of those of dV where not whole (columns.py)."""

    qk: Any
    v: Any
    dv: Any


class Work(NamedTuple):
    """What a program works on. Steps are tiles of queries of one head after another that shares the key head, ``tiles_m``
    each; the wave has those from ``first_step`` to ``end_step``. Tiles of a head before ``low`` do not see the keys, and from
    ``whole`` on every query sees all of them. Of windows and packed sequences (band.py) the wave has whole heads, of numbers
    ``first_step`` to ``end_step``, each with dS of ``band`` tiles; ``tiles_m`` are those of a head's sums over rows."""

    batch: Any
    head: Any  # of keys, in its batch
    head_all: Any  # over all batches
    group: Any
    first_key: Any
    seqlen_k: Any
    offset: Any  # query i sees keys up to i + offset
    tiles_m: Any
    first_step: Any
    end_step: Any
    low: Any
    whole: Any
    rows: Any  # of the workspace, at which the program's first tile of dS is
    band: Any = NONE
    begin: Any = NONE  # of a window: query i sees keys from i + begin on
    sequence: Any = NONE
    tiles: Any = NONE  # the Band


@gluon.jit
def _heads(work):
    """The first head of the group that the wave has steps of, and the end."""
    if work.band is None:
        return work.first_step // work.tiles_m, (work.end_step + work.tiles_m - 1) // work.tiles_m
    else:
        return work.first_step, work.end_step


@gluon.jit
def _tiles(work, head):
    """The tiles of queries of a head of the group in this wave: the first, the first without a mask, the one past the last of
    these, the end."""
    if work.band is None:
        before = head * work.tiles_m
        low = gl.maximum(work.low, work.first_step - before)
        high = gl.maximum(gl.minimum(work.tiles_m, work.end_step - before), low)
        return low, gl.minimum(gl.maximum(work.whole, low), high), high, high
    else:
        return work.tiles.low, work.tiles.whole, work.tiles.beyond, work.tiles.high


@gluon.jit
def _space_row(work, head, low, BLOCK_N: gl.constexpr):
    """The row of the workspace of the first tile of a head in this wave."""
    if work.band is None:
        return work.rows + (head * work.tiles_m + low - work.first_step) * BLOCK_N
    else:
        return work.rows + (head - work.first_step) * work.band * BLOCK_N


@gluon.jit
def _resumes(work):
    """Whether a wave before this one kept sums of the program."""
    if work.band is None:
        return (work.first_step > work.low) & (work.low < work.tiles_m)
    else:
        return work.first_step > 0


@gluon.jit
def _steps(work):
    """The end of the steps of all waves."""
    return work.tiles_m * work.group if work.band is None else work.group


@gluon.jit
def _load(descs, smem, barriers, work):
    """The producer: Q, dO and the numbers of their rows, a tile of queries a stage."""
    STAGES: gl.constexpr = smem.q.shape[0]
    BLOCK_M: gl.constexpr = smem.q.shape[-2]
    state = first_stage()
    first, end = _heads(work)
    for one in range(first, end):
        low, _, _, high = _tiles(work, one)
        head = work.head * work.group + one
        numbers = (work.head_all * work.group + one) * (work.tiles_m * BLOCK_M)
        if work.band is None:
            origin = origin_of(None, work.batch, head)
        else:
            origin = origin_of(work.sequence.queries, work.batch, head)
            if work.sequence.first_row is not None:
                numbers += work.sequence.first_row
        for tile in range(low, high):
            row = tile * BLOCK_M
            mbarrier.wait(barriers.empty.index(state.stage), state.phase ^ 1)
            full = barriers.full.index(state.stage)
            mbarrier.expect(full, descs.q.block_type.nbytes + descs.dout.block_type.nbytes + 8 * BLOCK_M)
            tma_load(descs.q, coordinates(origin, row, 0), full, smem.q.index(state.stage))
            tma_load(descs.lse, [numbers + row], full, smem.lse.index(state.stage))
            tma_load(descs.dout, coordinates(origin, row, 0), full, smem.dout.index(state.stage))
            tma_load(descs.delta, [numbers + row], full, smem.delta.index(state.stage))
            state = advance(state, STAGES)


@gluon.jit
def _step(
    step, tile, space_row, dk, dv, descs, smem, barriers, work, scales, PART: gl.constexpr, SECOND: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """dK and dV with a tile of queries added, whose dS goes out.

    dV is started before dP is waited for: the assembler would else move that wait above all of the exponentials, and nothing
    would run beside them.
    """
    STAGES: gl.constexpr = smem.q.shape[0]
    BLOCK_M: gl.constexpr = smem.q.shape[-2]
    CONSUMERS: gl.constexpr = smem.k.shape[0]
    s_layout: gl.constexpr = layout_of(BLOCK_M, 4, 3 - CONSUMERS)
    stage = step % STAGES
    q, dout = as_matrix(smem.q, stage), as_matrix(smem.dout, stage)  # [BLOCK_M, D], [BLOCK_M, DV]
    place = unfolded(PART, step, CONSUMERS == 2 and smem.k.shape[-1] > 128)
    k, v = as_matrix(smem.k, place), as_matrix(smem.v, place)  # [KEYS, D], [KEYS, DV]
    mbarrier.wait(barriers.full.index(stage), step // STAGES & 1)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, s_layout)
    s = start_over_columns(k, q, zeros, SECOND.qk)  # [KEYS, BLOCK_M]
    dp = start_over_columns(v, dout, zeros, SECOND.v)
    s = warpgroup_mma_wait(2 if SECOND.v else 1, [s])
    lse = smem.lse.index(stage).load(gl.SliceLayout(0, s_layout))  # [BLOCK_M]
    if scales.cap is None:
        p = gl.exp2(s * scales.log2 - lse[None, :])
    else:
        half = capped(s, scales.cap)  # (tanh - 1) / 2, of scores less the cap
        p = gl.exp2(half * scales.log2 - (lse - 0.5 * scales.log2)[None, :])
    if MASKED:
        key = work.first_key + PART * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, s_layout))
        if work.band is None:
            last = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, s_layout)) + work.offset
            p = gl.where(gl.minimum(last, work.seqlen_k - 1)[None, :] >= key[:, None], p, 0.0)
        else:
            p = seen_alone(p, key, tile * BLOCK_M, work.sequence, work.begin)
    ds_smem = smem.ds.index(PART * _SLOTS + step % _SLOTS)
    p16 = p.to(smem.dout.dtype)
    if scales.cap is not None:
        p *= -4.0 * half * (1.0 + half)  # 1 - tanh^2
    if descs.v is not None and CONSUMERS == 2:
        dv = start_columns(p16, dout, dv, SECOND.dv, True)
    elif descs.v is not None:
        smem.p.store(p16)
        fence_async_shared()
        barrier()
        dv = start_columns(smem.p, dout, dv, SECOND.dv)
    dp = warpgroup_mma_wait(len(dv), [dp])
    delta = smem.delta.index(stage).load(gl.SliceLayout(0, s_layout))
    ds = (p * (dp - delta[None, :])).to(smem.q.dtype)
    ds_smem.store(ds)
    fence_async_shared()
    barrier()
    if descs.k is not None:
        dk = start_columns(ds_smem, q, dk, SECOND.qk)
    if descs.ds is not None:
        tma_store(descs.ds, [space_row, 0], ds_smem)
    if len(dk + dv) > 0:
        done = wait_for_columns(0, dk + dv)
        dk, dv = done[: len(dk)], done[len(dk) :]
    tma.store_wait(_SLOTS - 1)  # the slot that the next step takes; the barrier of the arrival tells all warps
    mbarrier.arrive(barriers.empty.index(stage))
    return dk, dv


@gluon.jit
def _consume(descs, smem, barriers, work, kept, scale, softcap, PART: gl.constexpr, SECOND: gl.constexpr, MASKS: gl.constexpr):
    """A consumer: KEYS keys."""
    CONSUMERS: gl.constexpr = smem.k.shape[0]
    scales = Scales(scale * 1.4426950408889634, softcap) if softcap is None else capped_scales(scale, softcap)
    D: gl.constexpr = smem.k.shape[-1]
    DV: gl.constexpr = smem.v.shape[-1]
    dk = () if descs.k is None else no_columns(KEYS, D, SECOND.qk, 4, 3 - CONSUMERS)
    dv = () if descs.v is None else no_columns(KEYS, DV, SECOND.dv, 4, 3 - CONSUMERS)
    if kept.dk is not None:
        resumes = _resumes(work)
        dk = load_kept(kept.dk, kept.row + PART * KEYS, dk, resumes, D)
        dv = load_kept(kept.dv, kept.row + PART * KEYS, dv, resumes, DV)
    mbarrier.wait(barriers.keys, 0)
    step = gl.to_tensor(0)
    first, end = _heads(work)
    for one in range(first, end):
        low, whole, beyond, high = _tiles(work, one)
        space_row = _space_row(work, one, low, CONSUMERS * KEYS) + PART * KEYS
        if MASKS:
            for tile in range(low, whole):
                dk, dv = _step(step, tile, space_row, dk, dv, descs, smem, barriers, work, scales, PART, SECOND, True)
                step += 1
                space_row += CONSUMERS * KEYS
        for tile in range(whole, beyond):
            dk, dv = _step(step, tile, space_row, dk, dv, descs, smem, barriers, work, scales, PART, SECOND, False)
            step += 1
            space_row += CONSUMERS * KEYS
        if work.begin is not None:
            for tile in range(beyond, high):
                dk, dv = _step(step, tile, space_row, dk, dv, descs, smem, barriers, work, scales, PART, SECOND, True)
                step += 1
                space_row += CONSUMERS * KEYS
    if kept.dk is not None:
        if work.end_step < _steps(work):
            keep(kept.dk, kept.row + PART * KEYS, dk, D)
            keep(kept.dv, kept.row + PART * KEYS, dv, DV)
        else:
            _write(dk, dv, descs, smem, work, scale, PART, SECOND)
    else:
        _write(dk, dv, descs, smem, work, scale, PART, SECOND)
    tma.store_wait(0)


@gluon.jit
def _write(dk, dv, descs, smem, work, scale, PART: gl.constexpr, SECOND: gl.constexpr):
    """Write dK and dV, by way of the memory of K and V."""
    barrier()
    if descs.k is not None:
        put(as_matrix(smem.k, PART), scaled(dk, scale), SECOND.qk)
    if descs.v is not None:
        put(as_matrix(smem.v, PART), dv, SECOND.dv)
    fence_async_shared()
    barrier()
    origin = origin_of(None if work.band is None else work.sequence.every_key, work.batch, work.head)
    row = work.first_key + PART * KEYS
    if descs.k is not None:
        tma_store(descs.k, coordinates(origin, row, 0), smem.k.index(PART))
    if descs.v is not None:
        tma_store(descs.v, coordinates(origin, row, 0), smem.v.index(PART))


@gluon.jit(do_not_specialize=SIZES)
def flashmoe_bwd_dkdv_gluon_sm90(
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, ds_desc, dk_desc, dv_desc, dk_kept, dv_kept,
    cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale, softcap,
    heads_kv, group, seqlen_k, tiles_m, offset, first_head, first_step, end_step, first_tile, tiles_n,
    band, begin, batches, total_q, total_k,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, MASKS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr, SECOND_QK: gl.constexpr, SECOND_V: gl.constexpr,
):  # fmt: skip
    """The grid: heads of a set, tiles of keys, sets of heads of keys. The wave has ``tiles_n`` tiles of keys from
    ``first_tile`` on; those that no query of the wave sees are left out. Without MASKS every query sees every key."""
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[-2]
    BLOCK_N: gl.constexpr = CONSUMERS * KEYS
    head_of_wave, tile = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0), gl.program_id(1)
    head_all, first_key = first_head + head_of_wave, (first_tile + tile) * BLOCK_N
    if band is None:
        low = gl.minimum(gl.maximum(first_key - offset, 0) // QUERIES * (QUERIES // BLOCK_M), tiles_m)
        whole = (gl.maximum(first_key + BLOCK_N - 1 - offset, 0) + BLOCK_M - 1) // BLOCK_M
        whole = gl.where(first_key + BLOCK_N > seqlen_k, tiles_m, whole)
        place = head_of_wave * tiles_n + tile
        work = Work(
            head_all // heads_kv, head_all % heads_kv, head_all, group, first_key, seqlen_k, offset, tiles_m, first_step,
            end_step, low, whole, place * (end_step - first_step) * BLOCK_N,
        )  # fmt: skip
        of_keys = None
    else:
        sequence = Sequence(tiles_m // (QUERIES // BLOCK_M), seqlen_k, offset)
        if cu_seqlens_q is not None:
            packed = Packed(cu_seqlens_q, cu_seqlens_k, seqused_k, batches, total_q, total_k)
            number = number_of_sequence(cu_seqlens_k, batches, first_tile + tile, BLOCK_N)
            sequence = sequence_at(packed, number, offset, BLOCK_N)
            first_key -= sequence.first_tile * BLOCK_N
            if begin is not None:
                begin += sequence.diagonal
        place = head_of_wave * tiles_n + tile
        work = Work(
            head_all // heads_kv, head_all % heads_kv, head_all, group, first_key, seqlen_k, offset, tiles_m, first_step,
            end_step, None, None, place * (end_step - first_step) * band * BLOCK_N,
            band, begin, sequence, band_of_keys(sequence, begin, first_key, BLOCK_M, BLOCK_N, QUERIES),
        )  # fmt: skip
        of_keys = sequence.keys

    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    dout_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + dout_desc.block_type.shape, dout_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS] + v_desc.block_type.shape, v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], q_desc.dtype)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS * _SLOTS, KEYS, BLOCK_M], ds_layout)
    p_smem = ds_smem
    if CONSUMERS == 1:
        p_smem = gl.allocate_shared_memory(q_desc.dtype, [KEYS, BLOCK_M], ds_layout)
    full, empty = make_barriers(STAGES, CONSUMERS)
    keys = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys, count=1)
    fence_async_shared()
    mbarrier.expect(keys, (k_desc.block_type.nbytes + v_desc.block_type.nbytes) * CONSUMERS)
    origin = origin_of(of_keys, work.batch, work.head)
    for part in gl.static_range(CONSUMERS):
        tma_load(k_desc, coordinates(origin, first_key + part * KEYS, 0), keys, k_smem.index(part))
        tma_load(v_desc, coordinates(origin, first_key + part * KEYS, 0), keys, v_smem.index(part))

    smem = Tensors(q_smem, dout_smem, lse_smem, delta_smem, k_smem, v_smem, ds_smem, p_smem)
    sources = Tensors(q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc, ds_desc, ds_desc)
    results = Tensors(q_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc, ds_desc, ds_desc)
    barriers = Barriers(full, empty, keys)
    kept = Kept(dk_kept, dv_kept, place * BLOCK_N)
    # With P in registers two products of few columns take longer than one of 128 (docs/notes/fwd-gluon-sm90.md).
    WHOLE_DV: gl.constexpr = CONSUMERS == 2 and v_smem.shape[-1] <= 128
    SECOND: gl.constexpr = Second(SECOND_QK, SECOND_V, 0 if WHOLE_DV else SECOND_V)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (results, smem, barriers, work, kept, softmax_scale, softcap, 0, SECOND, MASKS)),
                (_load, (sources, smem, barriers, work)),
            ],
            [1], [PRODUCER_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (results, smem, barriers, work, kept, softmax_scale, softcap, 0, SECOND, MASKS)),
                (_consume, (results, smem, barriers, work, kept, softmax_scale, softcap, 1, SECOND, MASKS)),
                (_load, (sources, smem, barriers, work)),
            ],
            [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
        )  # fmt: skip
