"""Online softmax of scores [BLOCK_M, BLOCK_N] in registers: one step over a tile of keys, sums of rows, what normalises O.

Scores are accumulators of warpgroup_mma, of 64 rows for a consumer warpgroup. Online softmax: Milakov and Gimelshein 2018.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.attention.device import softmax_triton
from flashmoe_science.ops.gluon_bridge import as_gluon

GROWTH = gl.constexpr(8.0)  # of a row's maximum, as a power of two, at which O is rescaled; where smaller it keeps its scale
log2_of_sum = as_gluon(softmax_triton.log2_of_sum)
log_sum_exp = as_gluon(softmax_triton.log_sum_exp)
with_sink = as_gluon(softmax_triton.with_sink)


@gluon.jit
def as_column(rows, matrix):
    """A number for each row as a column for a matrix, [rows, 1]."""
    return gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(1, matrix.type.layout)), 1)


@gluon.jit
def row_maxima(s, row_max, PAIRS_LAST: gl.constexpr):
    """The largest score of each row, laid out as ``row_max``."""
    # A thread's pairs, then its columns, then the four threads of a row: a third of the dependent steps of a plain reduction.
    scores = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])  # [BLOCK_M, BLOCK_N / 8, threads of a row, 2]
    if PAIRS_LAST:
        own = gl.max(gl.max(scores, 1), 2)
    else:
        own = gl.max(gl.max(scores, 3), 1)
    return gl.convert_layout(gl.max(own, 1), row_max.type.layout)


@gluon.jit
def softmax_step(s, row_max, scale_log2, MASKED: gl.constexpr, LAZY: gl.constexpr, PAIRS_LAST: gl.constexpr = False):
    """One online-softmax step. Returns P = exp2(s * scale - max), [BLOCK_M, BLOCK_N], the new maximum, and the factor by which
    older sums and O must shrink, [BLOCK_M] each. MASKED: a row may have seen no key yet. PAIRS_LAST: the order in which maxima
    are found, for the assembler's sake (docs/notes/fwd-gluon-sm90.md); results are equal.

    Where LAZY, the maximum is one within a factor of 2^GROWTH: the old one stays until a score exceeds it by more, and the
    factor is exactly 1. Probabilities are at the most 2^GROWTH then, which the 16-bit types and fp32 sums hold.

    Maxima are kept scaled. Scaled anew in each step, the old one would meet the new one in a fused multiply-add that does not
    round it: the factor would miss 1 by the rounding error where the maximum stays, and in every step by the same.
    """
    tile_max = row_maxima(s, row_max, PAIRS_LAST)
    if LAZY:  # NaN is not above: the old maximum stays where both are -inf or the tile's is NaN, as with gl.maximum
        tile_max *= scale_log2
        new_max = gl.where(tile_max - row_max > GROWTH, tile_max, row_max)
    else:
        new_max = gl.maximum(row_max, tile_max * scale_log2)
    shift = new_max
    if MASKED:  # subtract 0 from a row without keys, since -inf - -inf is NaN
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(shift, 1))
    return p, new_max, gl.exp2(row_max - shift)


@gluon.jit
def own_sums(p):
    """Sums of P over the columns that each thread holds, [BLOCK_M, 4]: four threads of a row reduce theirs once, at the end."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def add_to_sums(row_sum, lost, p, rescale, COMPENSATED: gl.constexpr):
    """Sums of rows, [BLOCK_M, 4], with those of P, and what rounding took from them. Not COMPENSATED for that (Kahan 1965), a
    sum of 16k is off by 2e-6 of itself: all of the error of a log-sum-exp."""
    shrink = as_column(rescale, row_sum)
    before = row_sum * shrink
    more = gl.convert_layout(own_sums(p), row_sum.type.layout)
    if COMPENSATED:
        more -= lost * shrink
    row_sum = before + more
    if COMPENSATED:
        lost = (row_sum - before) - more
    return row_sum, lost


@gluon.jit
def normalizer(row_max, row_sum, sink):
    """Maxima and sums of rows, with the logit of a ``sink`` unless it is None, and the factors that normalise O."""
    shrink = 1.0
    if sink is not None:
        row_max, row_sum, shrink = with_sink(sink, row_max, row_sum)
    # A row that sees no key has a sum of 0: its output is 0 and its log-sum-exp log(0) = -inf.
    return row_max, row_sum, shrink / gl.where(row_sum == 0.0, 1.0, row_sum)
