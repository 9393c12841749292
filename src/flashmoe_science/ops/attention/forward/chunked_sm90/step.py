"""A consumer's step in chunk_gluon_sm90.py: S = Q K^T of a tile of keys beside O += P V of the tile before; masks, softmax."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashmoe_science.ops.attention.device import sm90
from flashmoe_science.ops.attention.device.mask import columns_before
from flashmoe_science.ops.attention.device.output import LAZY_ABOVE, rescale_rows, start_output, wait_for_output
from flashmoe_science.ops.attention.device.softmax import capped, own_sums, softmax_step
from flashmoe_science.ops.attention.device.tiles import as_matrix
from flashmoe_science.ops.pipeline_gluon import advance

ROWS = gl.constexpr(sm90.ROWS)


@gluon.jit
def query_tiles(smem, slot):
    """A consumer's rows of each part of Q, as matrices."""
    ROWS_: gl.constexpr = smem[0].shape[3] * smem[0].shape[4]
    first = smem[0].index(slot).reshape([ROWS_, smem[0].shape[5]])
    if len(smem) == 2:
        return first, smem[1].index(slot).reshape([ROWS_, smem[1].shape[5]])
    else:
        return (first,)


@gluon.jit
def start_scores(q, k_smem, stage):
    """Start S = Q K^T: an accumulator in flight, of as many products as there are parts."""
    BLOCK_N: gl.constexpr = k_smem[0].shape[3]
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    s = warpgroup_mma(q[0], as_matrix(k_smem[0], stage).permute((1, 0)), s, use_acc=False, is_async=True)
    if len(k_smem) == 2:
        s = warpgroup_mma(q[1], as_matrix(k_smem[1], stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def mask(s, tile, low, limit):
    """-inf where a key is not before its row's ``limit``, or is of a tile before ``low``."""
    limit = gl.where(tile < low, 0, limit - tile * s.shape[1])
    return gl.where(columns_before(s, gl.expand_dims(limit, 1)), s, float("-inf"))


@gluon.jit
def behind(left, right):
    """Keys that a query sees before its last one: ``right`` of them after the key at its own place, unless None are."""
    if right is None:
        return left
    else:
        return left + right


@gluon.jit
def limits_of(limit, first_query, span, QUERIES: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Of a consumer's rows: where they end to see keys, alone where no window is on the left. Else where each begins, where it
    ends, and the tiles of keys that all of them see: from the one to before the other."""
    low, high, count, first_head, first_row, seqlen_q, seqlen_k, diagonal, left, right = span
    if left is None:
        return (limit,)
    else:
        to_first = diagonal - behind(left, right)
        first = first_query + gl.arange(0, ROWS, limit.type.layout) % QUERIES + to_first
        last_query = gl.minimum(first_query + QUERIES, seqlen_q) - 1
        begin = (gl.maximum(last_query + to_first, 0) + BLOCK_N - 1) // BLOCK_N
        end = seqlen_k
        if CAUSAL:
            end = gl.maximum(gl.minimum(first_query + diagonal + 1, seqlen_k), 0)
        return first, limit, begin, end // BLOCK_N


@gluon.jit
def mask_window(s, tile, first, limit):
    """-inf where a key is before its row's ``first`` or not before its ``limit``."""
    first, limit = gl.expand_dims(first - tile * s.shape[1], 1), gl.expand_dims(limit - tile * s.shape[1], 1)
    return gl.where(columns_before(s, limit) & (columns_before(s, first) == 0), s, float("-inf"))


@gluon.jit
def tile_step(
    tile, q, memory, barriers, scales, low, limits, state, rings,
    MASKED: gl.constexpr, COMPENSATED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """S of a tile of keys beside P V of the one before, and the softmax of S beside P V. See ``tile_step`` of
    fwd_step_gluon_sm90.py for the wait on a barrier that has long completed."""
    p, o, row_max, row_sum, lost = state
    stage_k, phase_k, stage_v, phase_v = rings
    q_smem, k_smem, v_smem = memory
    q_full, k_full, k_empty, v_full, v_empty = barriers
    LAZY: gl.constexpr = SPLIT and (len(o) == 2 or o[0].shape[1] > LAZY_ABOVE)  # as measured: 11 to 15% slower without splits
    mbarrier.wait(k_full.index(stage_k), phase_k)
    s_token = start_scores(q, k_smem, stage_k)
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o_tokens = start_output(p, o, v_smem, stage_v)
    s = warpgroup_mma_wait(len(o), [s_token])
    mbarrier.arrive(k_empty.index(stage_k))
    stage_k, phase_k = advance(stage_k, phase_k, k_smem[0].shape[0])
    if scales[1] is not None:
        s = capped(s, scales[1])
    if len(limits) == 4:
        if (tile < limits[2]) | (tile >= limits[3]):
            s = mask_window(s, tile, limits[0], limits[1])
    elif MASKED:
        s = mask(s, tile, low, limits[0])
    p32, row_max, rescale = softmax_step(s, row_max, scales[0], MASKED, LAZY)
    shrink = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout)), 1)
    before = row_sum * shrink
    more = gl.convert_layout(own_sums(p32), row_sum.type.layout)
    if COMPENSATED:  # for what rounding takes (Kahan 1965)
        more -= lost * shrink
    row_sum = before + more
    if COMPENSATED:
        lost = (row_sum - before) - more
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o = wait_for_output(o_tokens)
    mbarrier.arrive(v_empty.index(stage_v))
    stage_v, phase_v = advance(stage_v, phase_v, v_smem[0].shape[0])
    o = rescale_rows(o, rescale, LAZY)
    p = gl.convert_layout(p32.to(v_smem[0].dtype), gl.DotOperandLayout(0, o[0].type.layout, 2))
    return (p, o, row_max, row_sum, lost), (stage_k, phase_k, stage_v, phase_v)
