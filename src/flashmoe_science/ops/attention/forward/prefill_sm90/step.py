"""A consumer's step of fwd_gluon_sm90: S = Q K^T of a tile of keys during O += P V of the tile before; score mods, softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashmoe_science.ops.attention.device.bias import add_alibi, add_bias, load_bias
from flashmoe_science.ops.attention.device.kv_pipeline import RowState, release_v, start_products
from flashmoe_science.ops.attention.device.mask import mask_keys
from flashmoe_science.ops.attention.device.output import rescale_rows, to_operand, wait_for_output
from flashmoe_science.ops.attention.device.softcap import capped, capped_softmax_step
from flashmoe_science.ops.attention.device.softmax import add_to_sums, softmax_step
from flashmoe_science.ops.attention.device.wide import rescale_wide, to_wide_operand, warp_moved


class ScoreMods(NamedTuple):
    """What turns products Q K^T of a consumer's rows into scores."""

    scales: Any
    bias: Any
    rows: Any  # where each row's bias begins, or of ALiBi the AlibiRows
    first_row: Any
    bounds: Any


@gluon.jit
def apply_score_mods(s, mods, bias, first_key):
    """Scores with a soft cap and a ``bias``, or ALiBi's, and the scale that a softmax is to take for them."""
    if mods.scales.cap is not None:
        s = capped(s, mods.scales.cap)
    scale_log2 = mods.scales.log2
    if mods.bias.base is not None:
        s, scale_log2 = add_bias(s, bias, scale_log2)
    if mods.bias.slopes is not None:
        s, scale_log2 = add_alibi(s, scale_log2, mods.rows, first_key)
    return s, scale_log2


@gluon.jit
def probabilities(p, o, v_smem, v_low):
    """P as the operand of the next product with V."""
    if v_low is not None:
        return to_wide_operand(p, v_smem[0].dtype, len(o) * o[0].shape[1])
    else:
        return to_operand(p, o, v_smem[0].dtype)


@gluon.jit
def tile_step(
    tile, q_stage, buffers, barriers, mods, v_low, state, kv, MASKED: gl.constexpr, LAZY: gl.constexpr, TRAITS: gl.constexpr
):  # fmt: skip
    """Attend to a tile of keys: its S is computed during P V of the one before, which is the tile after it.

    The assembler would sink the softmax below the wait for P V, and with it the overlap; it does not move it across the
    branch of an mbarrier's wait. Hence the wait on a barrier that has long completed.
    """
    BLOCK_N: gl.constexpr = buffers.k[0].shape[-2]
    bias, scales = mods.bias, mods.scales
    loaded = bias.base
    if bias.base is not None:
        loaded = load_bias(mods.rows, tile * BLOCK_N, mods.bounds.seqlen_k, BLOCK_N, MASKED)
    s, o_tokens, kv = start_products(q_stage, buffers, barriers, state.p, state.o, kv, v_low)  # s: [BLOCK_M, BLOCK_N]
    HIDES: gl.constexpr = MASKED or bias.base is not None
    PAIRS_LAST: gl.constexpr = v_low is None and state.o[0].shape[1] == 64
    if scales.cap is not None and bias.slopes is None and not HIDES and BLOCK_N == 128:
        p32, row_max, rescale = capped_softmax_step(s, state.max, scales, LAZY)
    else:
        s, scale_log2 = apply_score_mods(s, mods, loaded, tile * BLOCK_N)
        if MASKED:
            s = mask_keys(s, tile * BLOCK_N, mods.first_row, mods.bounds, buffers.q[0].shape[-2], TRAITS.CAUSAL)
        p32, row_max, rescale = softmax_step(s, state.max, scale_log2, HIDES, LAZY, PAIRS_LAST)
    row_sum, lost = add_to_sums(state.sum, state.lost, p32, rescale, TRAITS.WRITE_LSE)
    if v_low is not None:
        moved = warp_moved(rescale, LAZY)
    mbarrier.wait(barriers.v_full.index(kv.v.stage), kv.v.phase)
    o = wait_for_output(o_tokens)  # [BLOCK_M, width]
    if v_low is not None:
        o = rescale_wide(o, rescale, moved)
    else:
        o = rescale_rows(o, rescale, LAZY)
    kv = release_v(barriers, kv)
    return RowState(probabilities(p32, o, buffers.v, v_low), o, row_max, row_sum, lost), kv
