"""A program of two tiles of keys: each has a consumer of its own, with dK and dV."""

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
    start_columns,
    start_over_columns,
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
from flashmoe_science.ops.attention.device.tiles import accumulator_layout, as_matrix, coordinates, unfolded
from flashmoe_science.ops.gluon_bridge import barrier, tma_store


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
    layout: gl.constexpr = accumulator_layout(BLOCK_M)
    stage = step % STAGES
    q, dout = as_matrix(smem.q, stage), as_matrix(smem.dout, stage)  # [BLOCK_M, D], [BLOCK_M, DV]
    place = unfolded(PART, step, smem.k.shape[-1] > 128)
    k, v = as_matrix(smem.k, place), as_matrix(smem.v, place)  # [KEYS, D], [KEYS, DV]
    mbarrier.wait(barriers.queries.full.index(stage), step // STAGES & 1)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, layout)
    s = start_over_columns(k, q, zeros, SECOND.qk)  # [KEYS, BLOCK_M]
    dp = start_over_columns(v, dout, zeros, SECOND.v)
    s = warpgroup_mma_wait(2 if SECOND.v else 1, [s])
    of_dv, p = probabilities(s, stage, tile * BLOCK_M, work.first_key + PART * KEYS, smem, work, scales, MASKED)
    ds_smem = smem.ds.index(PART * SLOTS + step % SLOTS)
    if descs.v is not None:
        dv = start_columns(of_dv, dout, dv, SECOND.dv, True)
    dp = warpgroup_mma_wait(len(dv), [dp])
    delta = smem.delta.index(stage).load(gl.SliceLayout(0, layout))
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
    tma.store_wait(SLOTS - 1)  # the slot that the next step takes; the barrier of the arrival tells all warps
    mbarrier.arrive(barriers.queries.empty.index(stage))
    return dk, dv


@gluon.jit
def consume_tile(
    descs, smem, barriers, work, kept, scale, softcap, PART: gl.constexpr, SECOND: gl.constexpr, MASKS: gl.constexpr
):  # fmt: skip
    """A consumer: KEYS keys."""
    scales = Scales(scale * 1.4426950408889634, softcap) if softcap is None else capped_scales(scale, softcap)
    D: gl.constexpr = smem.k.shape[-1]
    DV: gl.constexpr = smem.v.shape[-1]
    dk = () if descs.k is None else no_columns(KEYS, D, SECOND.qk)
    dv = () if descs.v is None else no_columns(KEYS, DV, SECOND.dv)
    if kept.dk is not None:
        mask = resumes(work)
        dk = load_kept(kept.dk, kept.row + PART * KEYS, dk, mask, D)
        dv = load_kept(kept.dv, kept.row + PART * KEYS, dv, mask, DV)
    mbarrier.wait(barriers.keys, 0)
    step = gl.to_tensor(0)
    first, end = heads_of(work)
    for one in range(first, end):
        low, whole, beyond, high = tiles_of(work, one)
        space_row = space_row_of(work, one, low, 2 * KEYS) + PART * KEYS
        if MASKS:
            for tile in range(low, whole):
                dk, dv = _step(step, tile, space_row, dk, dv, descs, smem, barriers, work, scales, PART, SECOND, True)
                step += 1
                space_row += 2 * KEYS
        for tile in range(whole, beyond):
            dk, dv = _step(step, tile, space_row, dk, dv, descs, smem, barriers, work, scales, PART, SECOND, False)
            step += 1
            space_row += 2 * KEYS
        if work.begin is not None:
            for tile in range(beyond, high):
                dk, dv = _step(step, tile, space_row, dk, dv, descs, smem, barriers, work, scales, PART, SECOND, True)
                step += 1
                space_row += 2 * KEYS
    if kept.dk is not None:
        if work.end_step < steps_of(work):
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
