"""A consumer's step in fwd_gluon_sm90.py: S = Q K^T of a tile of keys beside O += P V of the tile before; modes, softmax."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashmoe_science.ops.attention.device.bias import biased, start_bias, with_alibi
from flashmoe_science.ops.attention.device.mask import mask_keys
from flashmoe_science.ops.attention.device.output import rescale_rows, start_output, wait_for_output
from flashmoe_science.ops.attention.device.softmax import capped, capped_softmax_step, own_sums, softmax_step
from flashmoe_science.ops.attention.device.tiles import as_matrix
from flashmoe_science.ops.attention.device.wide import moved_in_warp, packed, start_wide_output, wide_rescaled
from flashmoe_science.ops.pipeline_gluon import advance


@gluon.jit
def start_scores(q_smem, slot, k_smem, stage):
    """Start S = Q K^T: an accumulator in flight, of as many products as there are parts."""
    ROWS: gl.constexpr = q_smem[0].shape[-3] * q_smem[0].shape[-2]
    BLOCK_N: gl.constexpr = k_smem[0].shape[-2]
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    s = warpgroup_mma(as_matrix(q_smem[0], slot), as_matrix(k_smem[0], stage).permute((1, 0)), s, use_acc=False, is_async=True)
    if len(k_smem) == 2:
        s = warpgroup_mma(as_matrix(q_smem[1], slot), as_matrix(k_smem[1], stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def carried(p32, o, v_smem, v_low):
    """P as it goes from step to step: as the next product takes it."""
    if v_low is not None:
        return packed(p32, v_smem[0].dtype, len(o) * o[0].shape[1])
    else:
        return gl.convert_layout(p32.to(v_smem[0].dtype), gl.DotOperandLayout(0, o[0].type.layout, 2))


@gluon.jit
def start_values(p, o, v_smem, stage, v_low, STAGES: gl.constexpr):
    """Start O += P V in one product."""
    if v_low is None:
        return start_output(p, o, v_smem, stage)
    else:
        STAGE: gl.constexpr = v_smem[0].shape[0] // STAGES * v_smem[0].shape[-2] * v_smem[0].shape[-1] * 2  # bytes
        return start_wide_output(p, o, v_low + stage * (STAGE >> 4), v_smem[0].dtype)


@gluon.jit
def changed(s, scales, bias, drawn, of_rows, first_key):
    """Scores with what modes make of them, and by what a softmax is to scale them."""
    if scales[1] is not None:
        s = capped(s, scales[1])
    scale_log2 = scales[0]
    if bias[0] is not None:
        s, scale_log2 = biased(s, drawn, scale_log2)
    if bias[1] is not None:
        s, scale_log2 = with_alibi(s, scale_log2, of_rows, first_key)
    return s, scale_log2


@gluon.jit
def tile_step(
    tile, slot, memory, v_low, barriers, scales, bias, of_rows, first_row, span, state, rings,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, COMPENSATED: gl.constexpr, LAZY: gl.constexpr,
):  # fmt: skip
    """A tile of keys: its S is computed beside P V of the one before, which is the tile after it.

    The assembler would sink the softmax below the wait for P V, and with it the overlap; it does not move it across the
    branch of an mbarrier's wait. Hence the wait on a barrier that has long completed.

    ``state``: P of the tile before, O, and of each row the maximum, the sum and what rounding took from it.
    """
    p, o, row_max, row_sum, lost = state
    stage_k, phase_k, stage_v, phase_v = rings
    q_smem, k_smem, v_smem, o_smem = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    STAGES_K: gl.constexpr = k_smem[0].shape[0]
    STAGES_V: gl.constexpr = v_full.shape[0]
    BLOCK_N: gl.constexpr = k_smem[0].shape[-2]
    drawn = bias[0]
    if bias[0] is not None:
        drawn = start_bias(of_rows, tile * BLOCK_N, span[1], BLOCK_N, MASKED)
    mbarrier.wait(k_full.index(stage_k), phase_k)
    s_token = start_scores(q_smem, slot, k_smem, stage_k)
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o_tokens = start_values(p, o, v_smem, stage_v, v_low, STAGES_V)
    s = warpgroup_mma_wait(1, [s_token])
    mbarrier.arrive(k_empty.index(stage_k))
    stage_k, phase_k = advance(stage_k, phase_k, STAGES_K)
    HIDES: gl.constexpr = MASKED or bias[0] is not None
    PAIRS_LAST: gl.constexpr = v_low is None and o[0].shape[1] == 64
    if scales[1] is not None and bias[1] is None and not HIDES and BLOCK_N == 128:
        p32, row_max, rescale = capped_softmax_step(s, row_max, scales, LAZY)
    else:
        s, scale_log2 = changed(s, scales, bias, drawn, of_rows, tile * BLOCK_N)
        if MASKED:
            s = mask_keys(s, tile * BLOCK_N, first_row, span, q_smem[0].shape[-2], CAUSAL)
        p32, row_max, rescale = softmax_step(s, row_max, scale_log2, HIDES, LAZY, PAIRS_LAST)
    shrink = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout)), 1)
    before = row_sum * shrink
    more = gl.convert_layout(own_sums(p32), row_sum.type.layout)
    if COMPENSATED:  # for what rounding takes (Kahan 1965): else a sum of 16k is off by 2e-6, all of the error of an LSE
        more -= lost * shrink
    row_sum = before + more
    if COMPENSATED:
        lost = (row_sum - before) - more
    if v_low is not None:
        moved = moved_in_warp(rescale, LAZY)
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o = wait_for_output(o_tokens)
    if v_low is not None:
        o = wide_rescaled(o, rescale, moved)
    else:
        o = rescale_rows(o, rescale, LAZY)
    mbarrier.arrive(v_empty.index(stage_v))
    stage_v, phase_v = advance(stage_v, phase_v, STAGES_V)
    return (carried(p32, o, v_smem, v_low), o, row_max, row_sum, lost), (stage_k, phase_k, stage_v, phase_v)
