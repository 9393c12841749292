"""A program of one tile of keys, where dK and dV of two are too many registers: one consumer has dV, the other dK.

The first makes S and P, and adds to dV; the second makes dP, and of it and P dS, and adds to dK. P goes from one to the other
through shared memory, in fp32. So each has two products a step, one of which takes its other operand from registers, and beside
the exponentials of one consumer run the products of the other. S and dP of the next step are started beside what is added to dV
and dK, so that a step begins with both at hand. The last step starts them once more, and nothing takes them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from flashmoe_science.ops.attention.backward.columns import (
    keep,
    load_kept,
    no_columns,
    put,
    scaled,
    slices,
    start_columns,
    start_over_slices,
    wait_for_columns,
)
from flashmoe_science.ops.attention.backward.split_sm90.work import (
    SLOTS,
    heads_of,
    probabilities,
    resumes,
    space_row_of,
    steps_of,
    tiles_of,
)
from flashmoe_science.ops.attention.device.band import KEYS, origin_of
from flashmoe_science.ops.attention.device.softcap import Scales, capped_scales
from flashmoe_science.ops.attention.device.tiles import accumulator_layout, as_matrix, coordinates, in_turn_of_threads
from flashmoe_science.ops.gluon_bridge import barrier, tma_store


@gluon.jit
def _last_of(work):
    """The last step of the program in this wave; -1 where there is none."""
    first, end = heads_of(work)
    last = gl.to_tensor(-1)
    for one in range(first, end):
        low, _, _, high = tiles_of(work, one)
        last += high - low
    return last


@gluon.jit
def _start(keys, tiles, stages, step, SECOND: gl.constexpr):
    """Start the product of K or V, in slices, and of a step's tile of Q or dO, once that is there: [KEYS, BLOCK_M]."""
    STAGES: gl.constexpr = tiles.shape[0]
    BLOCK_M: gl.constexpr = tiles.shape[-2]
    mbarrier.wait(stages.full.index(step % STAGES), step // STAGES & 1)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, accumulator_layout(BLOCK_M))
    return start_over_slices(keys, as_matrix(tiles, step % STAGES), zeros, SECOND)


@gluon.jit
def _first(keys, tiles, stages, last, SECOND: gl.constexpr):
    """The same of the first step, waited for; zeros where there is no step."""
    BLOCK_M: gl.constexpr = tiles.shape[-2]
    product = gl.zeros([KEYS, BLOCK_M], gl.float32, accumulator_layout(BLOCK_M))
    if last >= 0:
        product = warpgroup_mma_wait(0, [_start(keys, tiles, stages, 0, SECOND)])
    return product


@gluon.jit
def _load_p(p_smem, layout: gl.constexpr):
    """P of the other consumer, [KEYS, BLOCK_M], which stored it as ``in_turn_of_threads`` gives it."""
    COLUMNS: gl.constexpr = p_smem.shape[0] * 2
    turn: gl.constexpr = in_turn_of_threads(gl.zeros([KEYS, COLUMNS], gl.float32, layout)).type.layout
    parts = p_smem.load(turn).reshape([COLUMNS // 8, 4, 8, 4, 2, 2])
    return gl.convert_layout(parts.permute((1, 4, 2, 0, 3, 5)).reshape([KEYS, COLUMNS]), layout, assert_trivial=True)


@gluon.jit
def _step_of_dv(
    step, last, tile, s, dv, k, descs, smem, barriers, work, scales, SECOND: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """dV with a tile of queries added, whose P goes to the other consumer; S of the next."""
    STAGES: gl.constexpr = smem.q.shape[0]
    BLOCK_M: gl.constexpr = smem.q.shape[-2]
    stage = step % STAGES
    of_dv, p = probabilities(s, stage, tile * BLOCK_M, work.first_key, smem, work, scales, MASKED)
    mbarrier.arrive(barriers.queries.empty.index(stage))
    if descs.v is not None:
        mbarrier.wait(barriers.douts.full.index(stage), step // STAGES & 1)
        dv = start_columns(of_dv, as_matrix(smem.dout, stage), dv, SECOND.dv, True)
    mbarrier.wait(barriers.p.empty.index(0), step & 1 ^ 1)
    smem.p.store(in_turn_of_threads(p))
    mbarrier.arrive(barriers.p.full.index(0))
    s = _start(k, smem.q, barriers.queries, gl.minimum(step + 1, last), SECOND.qk)
    if descs.v is not None:
        dv = wait_for_columns(2 if SECOND.qk else 1, dv)
    mbarrier.arrive(barriers.douts.empty.index(stage))
    s = warpgroup_mma_wait(0, [s])
    return s, dv


@gluon.jit
def consume_dv(descs, smem, barriers, work, kept, scale, softcap, SECOND: gl.constexpr, MASKS: gl.constexpr):
    """The consumer that has dV."""
    scales = Scales(scale * 1.4426950408889634, softcap) if softcap is None else capped_scales(scale, softcap)
    DV: gl.constexpr = smem.v.shape[-1]
    dv = () if descs.v is None else no_columns(KEYS, DV, SECOND.dv)
    if kept.dv is not None:
        dv = load_kept(kept.dv, kept.row, dv, resumes(work), DV)
    last = _last_of(work)
    mbarrier.wait(barriers.keys, 0)
    k = slices(as_matrix(smem.k, 0), SECOND.qk)
    s = _first(k, smem.q, barriers.queries, last, SECOND.qk)
    step = gl.to_tensor(0)
    first, end = heads_of(work)
    for one in range(first, end):
        low, whole, beyond, high = tiles_of(work, one)
        if MASKS:
            for tile in range(low, whole):
                s, dv = _step_of_dv(step, last, tile, s, dv, k, descs, smem, barriers, work, scales, SECOND, True)
                step += 1
        for tile in range(whole, beyond):
            s, dv = _step_of_dv(step, last, tile, s, dv, k, descs, smem, barriers, work, scales, SECOND, False)
            step += 1
        if work.begin is not None:
            for tile in range(beyond, high):
                s, dv = _step_of_dv(step, last, tile, s, dv, k, descs, smem, barriers, work, scales, SECOND, True)
                step += 1
    mbarrier.wait(barriers.p.empty.index(0), step & 1 ^ 1)  # the other's last product of V is done
    if kept.dv is not None:
        if work.end_step < steps_of(work):
            keep(kept.dv, kept.row, dv, DV)
        else:
            _write(dv, descs.v, smem.v, work, SECOND.dv)
    else:
        _write(dv, descs.v, smem.v, work, SECOND.dv)


@gluon.jit
def _step_of_dk(step, last, space_row, dp, dk, v, descs, smem, barriers, SECOND: gl.constexpr):
    """dK with a tile of queries added, whose dS goes out; dP of the next."""
    STAGES: gl.constexpr = smem.q.shape[0]
    layout: gl.constexpr = dp.type.layout
    stage = step % STAGES
    delta = smem.delta.index(stage).load(gl.SliceLayout(0, layout))
    mbarrier.arrive(barriers.douts.empty.index(stage))
    mbarrier.wait(barriers.p.full.index(0), step & 1)
    p = _load_p(smem.p, layout)
    mbarrier.arrive(barriers.p.empty.index(0))
    ds = (p * (dp - delta[None, :])).to(smem.q.dtype)
    if descs.k is not None:
        mbarrier.wait(barriers.queries.full.index(stage), step // STAGES & 1)
        dk = start_columns(ds, as_matrix(smem.q, stage), dk, SECOND.qk, True)
    dp = _start(v, smem.dout, barriers.douts, gl.minimum(step + 1, last), SECOND.v)
    if descs.ds is not None:
        ds_smem = smem.ds.index(step % SLOTS)
        ds_smem.store(ds)
        fence_async_shared()
        barrier()
        tma_store(descs.ds, [space_row, 0], ds_smem)
    if descs.k is not None:
        dk = wait_for_columns(2 if SECOND.v else 1, dk)
    tma.store_wait(SLOTS - 1)  # the slot that the next step takes; the barrier of the arrival tells all warps
    mbarrier.arrive(barriers.queries.empty.index(stage))
    dp = warpgroup_mma_wait(0, [dp])
    return dp, dk


@gluon.jit
def _values(smem, SECOND: gl.constexpr):
    """V for dP, in slices: in registers to 192 columns, which dK then leaves; shared memory is read less."""
    v = slices(as_matrix(smem.v, 0), SECOND)
    if SECOND > 0:
        operand: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(smem.q.shape[-2]), 2)
        return v[0].load(operand), v[1].load(operand)
    else:
        return v


@gluon.jit
def consume_dk(descs, smem, barriers, work, kept, scale, SECOND: gl.constexpr):
    """The consumer that has dK."""
    D: gl.constexpr = smem.k.shape[-1]
    dk = () if descs.k is None else no_columns(KEYS, D, SECOND.qk)
    if kept.dk is not None:
        dk = load_kept(kept.dk, kept.row, dk, resumes(work), D)
    last = _last_of(work)
    mbarrier.wait(barriers.keys, 0)
    v = _values(smem, SECOND.v)
    dp = _first(v, smem.dout, barriers.douts, last, SECOND.v)
    step = gl.to_tensor(0)
    first, end = heads_of(work)
    for one in range(first, end):
        low, _, _, high = tiles_of(work, one)
        space_row = space_row_of(work, one, low, KEYS)
        for _ in range(low, high):
            dp, dk = _step_of_dk(step, last, space_row, dp, dk, v, descs, smem, barriers, SECOND)
            step += 1
            space_row += KEYS
    if descs.k is not None:
        if kept.dk is not None:
            if work.end_step < steps_of(work):
                keep(kept.dk, kept.row, dk, D)
            else:
                _write(scaled(dk, scale), descs.k, smem.k, work, SECOND.qk)
        else:
            _write(scaled(dk, scale), descs.k, smem.k, work, SECOND.qk)
    tma.store_wait(0)


@gluon.jit
def _write(sums, desc, tiles, work, SECOND: gl.constexpr):
    """Write dK or dV, if it is asked for, by way of the memory of K or V."""
    if desc is not None:
        barrier()
        put(as_matrix(tiles, 0), sums, SECOND)
        fence_async_shared()
        barrier()
        origin = origin_of(None if work.band is None else work.sequence.every_key, work.batch, work.head)
        tma_store(desc, coordinates(origin, work.first_key, 0), tiles.index(0))
        tma.store_wait(0)
