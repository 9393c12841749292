"""Of 65 to 128 columns: consumers that multiply dS by K themselves, each for half of dQ's columns."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashmoe_science.ops.attention.backward.columns import scaled, slices, start_over_columns, start_over_slices
from flashmoe_science.ops.attention.backward.fused_sm90.work import (
    PRODUCT,
    SLOTS,
    place_of,
    seen,
    steps_of,
    write_keys,
)
from flashmoe_science.ops.attention.device.band import KEYS
from flashmoe_science.ops.attention.device.tiles import accumulator_layout, as_matrix, in_turn_of_threads, unfolded
from flashmoe_science.ops.attention.device.wide import in_parts, no_wide_output, start_wide_output, to_wide_operand


@gluon.constexpr_function
def _columns_of(part: int, width: int, second: int) -> int:
    """Columns of dQ that a consumer computes."""
    return second if part and second else width // 2


@gluon.jit
def _start_dq(step, smem, barriers, PART: gl.constexpr, SECOND: gl.constexpr):
    """Start dS^T K of a step, [PRODUCT, columns], of both consumers' dS and a consumer's columns, without the scale."""
    COLUMNS: gl.constexpr = _columns_of(PART, smem.k.shape[-1], SECOND)
    slot = step % SLOTS
    mbarrier.wait(barriers.ds.full.index(slot), step // SLOTS & 1)
    dq = gl.zeros([PRODUCT, COLUMNS], gl.float32, accumulator_layout(COLUMNS))
    for part in gl.static_range(2):
        ds = smem.ds.index(slot * 2 + part).permute((1, 0))  # [PRODUCT, KEYS]
        k = as_matrix(smem.k, unfolded(part, step, SECOND == 0))
        k = k.slice(PART * (smem.k.shape[-1] // 2), COLUMNS, 1)  # [KEYS, columns]
        dq = warpgroup_mma(ds, k, dq, use_acc=part > 0, is_async=True)
    return dq


@gluon.jit
def _put_dq(step, dq, smem, barriers, PART: gl.constexpr):
    """dQ of a step to its slot, which is full with dS of the next: one fence is for both. The second slot is empty once its
    relay has seen dS of the first step."""
    slot = step % SLOTS
    mbarrier.wait(barriers.dq.empty.index(slot), (step // SLOTS + slot) & 1 ^ 1)
    smem.dq.index(slot * 2 + PART).slice(0, dq.shape[1] // 2, 0).store(in_turn_of_threads(dq))


@gluon.jit
def _keys_of_scores(smem, PART: gl.constexpr, SECOND_QK: gl.constexpr, SECOND_V: gl.constexpr):
    """K for S, in slices: in registers, 24 a thread, where dK and dV leave room; shared memory is read less then."""
    k = slices(as_matrix(smem.k, PART), SECOND_QK)
    if SECOND_QK > 0 and SECOND_V > 0:
        operand: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(PRODUCT), 2)
        return k[0].load(operand), k[1].load(operand)
    else:
        return k


@gluon.jit
def _start_scores(step, smem, k, SECOND: gl.constexpr):
    """Start S of a step, [KEYS, PRODUCT]."""
    STAGES: gl.constexpr = smem.q.shape[0]
    zeros = gl.zeros([KEYS, PRODUCT], gl.float32, accumulator_layout(PRODUCT))
    return start_over_slices(k, as_matrix(smem.q, step % STAGES), zeros, SECOND)


@gluon.jit
def _no_sums(smem, SECOND: gl.constexpr):
    """dK or dV before the first product, in slices [KEYS, columns]."""
    WIDTH: gl.constexpr = smem.shape[-1]
    if SECOND == 0:
        return (gl.zeros([KEYS, WIDTH], gl.float32, accumulator_layout(WIDTH)),)
    else:
        return no_wide_output(KEYS, WIDTH // 2 + SECOND, PRODUCT)


@gluon.jit
def _start_sums(x, tile, stage, low, sums):
    """Start SUMS += X [KEYS, PRODUCT] times a stage's tile of queries, in flight: one product of the tile's columns, or of
    both slices' (device/wide.py)."""
    if low is None:
        operand = gl.convert_layout(x.to(tile.dtype), gl.DotOperandLayout(0, sums[0].type.layout, 2))
        return (warpgroup_mma(operand, tile, sums[0], is_async=True),)
    else:
        STAGE: gl.constexpr = tile.shape[0] * tile.shape[1] * 2  # bytes
        operand = to_wide_operand(x, tile.dtype, len(sums) * sums[0].shape[1])
        return start_wide_output(operand, sums, low + stage * (STAGE >> 4), tile.dtype)


@gluon.jit
def _in_slices(sums, SECOND: gl.constexpr, WIDTH: gl.constexpr):
    """dK or dV in the slices of columns.py."""
    if SECOND == 0:
        return sums
    else:
        return in_parts(sums, WIDTH // 2)


@gluon.jit
def _wait_for_queries(step, smem, barriers):
    STAGES: gl.constexpr = smem.q.shape[0]
    mbarrier.wait(barriers.queries.full.index(step % STAGES), step // STAGES & 1)


@gluon.jit
def _step(
    step, after, tile, s, dk, dv, k, smem, barriers, work, scale, PART: gl.constexpr, SECOND_QK: gl.constexpr,
    SECOND_V: gl.constexpr, MASKS: gl.constexpr,
):  # fmt: skip
    """dK and dV with a tile of queries added, whose dS and dQ go to shared memory, of S; S of the step ``after``.

    Every wait but one has another product running beside it: exponentials run beside dP, dS is made beside dV and stored beside
    dK, dQ is stored beside the next S. dK and dV are waited for before S is started: with their operands' registers too in
    flight there are too few, and ptxas serialises the products (C7512).
    """
    STAGES: gl.constexpr = smem.q.shape[0]
    layout: gl.constexpr = accumulator_layout(PRODUCT)
    stage, slot = step % STAGES, step % SLOTS
    q, dout = as_matrix(smem.q, stage), as_matrix(smem.dout, stage)  # [PRODUCT, D], [PRODUCT, DV]
    zeros = gl.zeros([KEYS, PRODUCT], gl.float32, layout)
    dp = start_over_columns(as_matrix(smem.v, unfolded(PART, step, SECOND_QK == 0)), dout, zeros, SECOND_V)
    lse = smem.lse.index(stage).load(gl.SliceLayout(0, layout))
    p = gl.exp2(s * scale - lse[None, :])
    if MASKS:
        p = seen(p, tile, tile * PRODUCT, work, PART)
    dv = _start_sums(p, dout, stage, smem.dout_low, dv)
    dp = warpgroup_mma_wait(1, [dp])
    delta = smem.delta.index(stage).load(gl.SliceLayout(0, layout))
    ds = (p * (dp - delta[None, :])).to(smem.q.dtype)
    dk = _start_sums(ds, q, stage, smem.q_low, dk)
    mbarrier.wait(barriers.queries.empty.index(stage), step // STAGES & 1 ^ 1)
    smem.ds.index(slot * 2 + PART).store(ds)
    fence_async_shared()
    mbarrier.arrive(barriers.ds.full.index(slot))
    dq = _start_dq(step, smem, barriers, PART, SECOND_QK)
    sums = warpgroup_mma_wait(2, dk + dv)
    dk, dv = sums[: len(dk)], sums[len(dk) :]
    _wait_for_queries(after, smem, barriers)
    s = _start_scores(after, smem, k, SECOND_QK)
    dq = warpgroup_mma_wait(2 if SECOND_QK else 1, [dq])
    mbarrier.arrive(barriers.queries.empty.index(stage))
    _put_dq(step, dq, smem, barriers, PART)
    s = warpgroup_mma_wait(0, [s])
    return s, dk, dv


@gluon.jit
def consume_wide(
    descs, smem, barriers, work, scale, PART: gl.constexpr, SECOND_QK: gl.constexpr, SECOND_V: gl.constexpr,
    MASKS: gl.constexpr,
):  # fmt: skip
    """A consumer: KEYS keys. SECOND: columns of the second slice of tiles (columns.py)."""
    dk, dv = _no_sums(smem.k, SECOND_QK), _no_sums(smem.v, SECOND_V)
    log2 = scale * 1.4426950408889634
    mbarrier.wait(barriers.keys, 0)
    k = _keys_of_scores(smem, PART, SECOND_QK, SECOND_V)
    last = steps_of(work) - 1
    if last >= 0:
        _wait_for_queries(0, smem, barriers)
    s = warpgroup_mma_wait(0, [_start_scores(0, smem, k, SECOND_QK)])
    for step in range(last + 1):
        _, tile = place_of(work, step)
        after = gl.minimum(step + 1, last)
        s, dk, dv = _step(step, after, tile, s, dk, dv, k, smem, barriers, work, log2, PART, SECOND_QK, SECOND_V, MASKS)
    if last >= 0:  # dK goes by way of the memory of K, which the other consumer's product for dQ reads too
        fence_async_shared()
        mbarrier.arrive(barriers.ds.full.index((last + 1) % SLOTS))
        mbarrier.wait(barriers.queries.empty.index(last % smem.q.shape[0]), last // smem.q.shape[0] & 1)
    WIDTH: gl.constexpr = smem.k.shape[-1]
    dk, dv = scaled(_in_slices(dk, SECOND_QK, WIDTH), scale), _in_slices(dv, SECOND_V, WIDTH)
    write_keys(dk, dv, descs, smem, work, PART, SECOND_QK, SECOND_V)
