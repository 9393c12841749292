"""Of 64 columns: consumers that give dS to a warpgroup of its own, which multiplies it by K, two products of queries a tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashmoe_science.ops.attention.backward.fused_sm90.work import (
    PRODUCT,
    SLOTS,
    place_of,
    seen,
    steps_of,
    write_keys,
)
from flashmoe_science.ops.attention.device.band import KEYS
from flashmoe_science.ops.attention.device.tiles import accumulator_layout, as_matrix, in_turn_of_threads

HALVES = gl.constexpr(4)  # slots of dS, of half a tile of queries


@gluon.jit
def _half(step, tile, dk, dv, k, smem, barriers, work, scale, PART: gl.constexpr, HALF: gl.constexpr, MASKS: gl.constexpr):
    """dK and dV with half a tile of queries added, whose dS goes to shared memory. dV is started before dP is waited for: the
    assembler would else move that wait above all of the exponentials."""
    STAGES: gl.constexpr = smem.q.shape[0]
    layout: gl.constexpr = accumulator_layout(PRODUCT)
    stage = step % STAGES
    q = as_matrix(smem.q, stage).slice(HALF * PRODUCT, PRODUCT, 0)  # [HALF, D]
    dout = as_matrix(smem.dout, stage).slice(HALF * PRODUCT, PRODUCT, 0)  # [HALF, DV]
    zeros = gl.zeros([KEYS, PRODUCT], gl.float32, layout)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [KEYS, HALF]
    dp = warpgroup_mma(as_matrix(smem.v, PART), dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    lse = smem.lse.index(stage).slice(HALF * PRODUCT, PRODUCT, 0).load(gl.SliceLayout(0, layout))
    p = gl.exp2(s * scale - lse[None, :])
    if MASKS:
        p = seen(p, tile, tile * (2 * PRODUCT) + HALF * PRODUCT, work, PART)
    operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    dv = warpgroup_mma(gl.convert_layout(p.to(smem.dout.dtype), operand), dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp])
    delta = smem.delta.index(stage).slice(HALF * PRODUCT, PRODUCT, 0).load(gl.SliceLayout(0, layout))
    ds = (p * (dp - delta[None, :])).to(smem.q.dtype)
    dk = warpgroup_mma(gl.convert_layout(ds, operand), q, dk, is_async=True)
    number = step * 2 + HALF
    slot = number % HALVES
    here = smem.ds.index(slot * 2 + PART)
    mbarrier.wait(barriers.ds.empty.index(slot), number // HALVES & 1 ^ 1)
    here.store(ds)
    fence_async_shared()
    mbarrier.arrive(barriers.ds.full.index(slot))
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    return dk, dv


@gluon.jit
def _step(step, tile, dk, dv, k, smem, barriers, work, scale, PART: gl.constexpr, MASKS: gl.constexpr):
    """dK and dV with a tile of queries added."""
    STAGES: gl.constexpr = smem.q.shape[0]
    mbarrier.wait(barriers.queries.full.index(step % STAGES), step // STAGES & 1)
    for half in gl.static_range(2):
        dk, dv = _half(step, tile, dk, dv, k, smem, barriers, work, scale, PART, half, MASKS)
    mbarrier.arrive(barriers.queries.empty.index(step % STAGES))
    return dk, dv


@gluon.jit
def consume_narrow(descs, smem, barriers, work, scale, PART: gl.constexpr, MASKS: gl.constexpr):
    """A consumer: KEYS keys."""
    D: gl.constexpr = smem.k.shape[-1]
    DV: gl.constexpr = smem.v.shape[-1]
    dk = gl.zeros([KEYS, D], gl.float32, accumulator_layout(D))
    dv = gl.zeros([KEYS, DV], gl.float32, accumulator_layout(DV))
    log2 = scale * 1.4426950408889634
    mbarrier.wait(barriers.keys, 0)
    k = as_matrix(smem.k, PART).load(gl.DotOperandLayout(0, accumulator_layout(PRODUCT), 2))
    for step in range(steps_of(work)):
        _, tile = place_of(work, step)
        dk, dv = _step(step, tile, dk, dv, k, smem, barriers, work, log2, PART, MASKS)
    last = steps_of(work) * 2 - 1
    if last > 0:  # dK goes by way of the memory of K, which the last product for dQ reads
        mbarrier.wait(barriers.ds.empty.index(last % HALVES), last // HALVES & 1)
    write_keys((dk * scale,), (dv,), descs, smem, work, PART)


@gluon.jit
def multiply(smem, barriers, work):
    """dS^T K of a tile of queries after the other, without the scale."""
    D: gl.constexpr = smem.k.shape[-1]
    zeros = gl.zeros([PRODUCT, D], gl.float32, accumulator_layout(D))
    mbarrier.wait(barriers.keys, 0)
    for step in range(steps_of(work)):
        slot = step % SLOTS
        for half in gl.static_range(2):
            number = step * 2 + half
            place = number % HALVES
            mbarrier.wait(barriers.ds.full.index(place), number // HALVES & 1)
            dq = zeros
            for part in gl.static_range(2):
                ds = smem.ds.index(place * 2 + part).permute((1, 0))  # [HALF, KEYS]
                dq = warpgroup_mma(ds, as_matrix(smem.k, part), dq, use_acc=part > 0, is_async=True)
            dq = warpgroup_mma_wait(0, [dq])
            mbarrier.arrive(barriers.ds.empty.index(place))
            if half == 0:
                mbarrier.wait(barriers.dq.empty.index(slot), step // SLOTS & 1 ^ 1)
            smem.dq.index(slot * 2 + half).store(in_turn_of_threads(dq))
        fence_async_shared()
        mbarrier.arrive(barriers.dq.full.index(slot))
