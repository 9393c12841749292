"""Online softmax of scores [BLOCK_M, BLOCK_N] in registers, and the soft cap on them.

Scores are accumulators of warpgroup_mma, of 64 rows for a consumer warpgroup.
"""

from __future__ import annotations

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.attention.device import lse_triton
from flashmoe_science.ops.attention.forward import tiled_triton as fwd_triton
from flashmoe_science.ops.gluon_bridge import as_gluon

GROWTH = gl.constexpr(8.0)  # of a row's maximum, as a power of two, at which O is rescaled; where smaller it keeps its scale
log2_of_sum = as_gluon(fwd_triton.log2_of_sum)
with_sink = as_gluon(lse_triton.with_sink)


@gluon.jit
def capped(s, scale):
    """(tanh(x) - 1) / 2 of the scores over the cap: -1 / (1 + e^(2 x)), with ``scale`` from a product Q K^T to log2 of e^(2 x).

    The softmax takes it times twice the cap: scores less the cap, which changes their maximum alone. Two instructions of the
    special-function unit and two others. A score is off by 2^-21 of the cap at the most, however small it is; what a softmax
    makes of scores follows from their differences.
    """
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [-1.0 - gl.exp2(s * scale)], gl.float32, True, 1)


@gluon.jit
def _row_maxima(s, row_max, PAIRS_LAST: gl.constexpr):
    """The largest score of each row, laid out as ``row_max``."""
    # A thread's pairs and columns in turn, then the four threads of a row: a third of the dependent steps of a plain reduction.
    scores = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    if PAIRS_LAST:
        own = gl.max(gl.max(scores, 1), 2)
    else:
        own = gl.max(gl.max(scores, 3), 1)
    return gl.convert_layout(gl.max(own, 1), row_max.type.layout)


@gluon.jit
def softmax_step(s, row_max, scale_log2, MASKED: gl.constexpr, LAZY: gl.constexpr, PAIRS_LAST: gl.constexpr = False):
    """One online-softmax step: probabilities, the new maximum, and the factor by which older sums and output must shrink.
    PAIRS_LAST: the order in which maxima are found, for the assembler's sake (docs/notes/fwd-gluon-sm90.md); results are equal.

    Where LAZY, the maximum is one within a factor of 2^GROWTH: the old one stays until a score exceeds it by more, and the
    factor is exactly 1. Probabilities are at the most 2^GROWTH then, which the 16-bit types and fp32 sums hold.

    Maxima are kept scaled. Scaled anew in each step, the old one would meet the new one in a fused multiply-add that does not
    round it: the factor would miss 1 by the rounding error where the maximum stays, and in every step by the same.
    """
    tile_max = _row_maxima(s, row_max, PAIRS_LAST)
    if LAZY:  # NaN is not above: the old maximum stays where both are -inf or the tile's is NaN, as with gl.maximum
        tile_max *= scale_log2
        new_max = gl.where(tile_max - row_max > GROWTH, tile_max, row_max)
    else:
        new_max = gl.maximum(row_max, tile_max * scale_log2)
    shift = new_max
    if MASKED:  # a row may have seen no key yet: subtract 0 then, since -inf - -inf is NaN
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(shift, 1))
    return p, new_max, gl.exp2(row_max - shift)


@gluon.jit
def own_sums(p):
    """Sums over the columns that each thread holds; the four threads that share a row meet only once, after the last tile."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


# tanh(x) / 2 = y P(y^2) with y = 2 x, for |y| below the first number: P's coefficients, the lowest power first, fitted to the
# least largest error, which for tanh is 2^-21. P rises for all y.
_HALF_TANH = (
    (0.69, (0.24999774992465973, -0.020794933661818504, 0.0019182744435966015)),
    (1.6, (0.2499987781047821, -0.020823391154408455, 0.002060346771031618, -1.8852073117159307e-04, 1.1195946171937976e-05)),
)
LEAST_CAP = gl.constexpr(30.0)  # from which on scores far below a row's maximum count for nothing, whatever P makes of them


def _bits(number: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', number))[0]:08X}"


def _capped_asm(count: int) -> str:
    """PTX for what ``capped`` gives of a thread's ``count`` scores, in place.

    A thread holds two rows, in turn two scores of each. The operands are the scores, then the rows' largest ones (operand
    2 * count of the one row and two later of the other), then ``capped``'s scale. A polynomial for |y| < Y serves a warp whose
    rows all have theirs in (-Y / 2, Y); NaN is not.
    """
    tops, scale = (2 * count, 2 * count + 2), f"${3 * count}"
    most = max(len(powers) for _, powers in _HALF_TANH)
    lines = ["{", ".reg .pred near;", f".reg .f32 over, square, power, top, p, {', '.join(f'c{n}' for n in range(most))};"]
    lines += [f"mul.f32 over, {scale}, {_bits(0.6931471805599453)};", "mul.f32 square, over, over;"]
    for tier, (reach, powers) in enumerate(_HALF_TANH):
        lines += [f"setp.eq.f32 near, {_bits(0.0)}, {_bits(0.0)};"]
        for top in tops:
            lines += [f"mul.f32 top, ${top}, over;", f"setp.lt.and.f32 near, top, {_bits(reach)}, near;"]
            lines += [f"setp.gt.and.f32 near, top, {_bits(-reach / 2)}, near;"]
        lines += ["vote.sync.all.pred near, near, 0xffffffff;", f"@!near bra FAR{tier};", "mov.f32 power, over;"]
        for n, one in enumerate(powers):
            lines += [f"mul.f32 c{n}, power, {_bits(one)};", "mul.f32 power, power, square;"]
        for score in range(count):
            lines += [f"mul.f32 top, ${score}, ${score};", f"mov.f32 p, c{len(powers) - 1};"]
            lines += [f"fma.rn.f32 p, p, top, c{n};" for n in reversed(range(len(powers) - 1))]
            lines += [f"fma.rn.f32 ${score}, p, ${score}, {_bits(-0.5)};"]
        lines += ["bra DONE;", f"FAR{tier}:"]
    for score in range(count):
        lines += [f"mul.f32 ${score}, ${score}, {scale};", f"ex2.approx.ftz.f32 ${score}, ${score};"]
        lines += [f"sub.f32 ${score}, {_bits(-1.0)}, ${score};", f"rcp.approx.ftz.f32 ${score}, ${score};"]
    return "\n".join([*lines, "DONE:", "}"])


_CAPPED = gl.constexpr(_capped_asm(64))
_CAPPED_OPERANDS = gl.constexpr(",".join(["=&f"] * 64 + [str(i) for i in range(64)] + ["f"] * 128))


@gluon.jit
def capped_softmax_step(s, row_max, scales, LAZY: gl.constexpr):
    """What ``softmax_step`` makes of ``capped`` scores, of which none is masked and each thread holds 64.

    A cap lets the largest score of a row stay the largest. Where those of a warp are small beside the cap, the rest are not far
    above, and a polynomial caps them: four or six multiply-adds a score, where ``capped`` takes two instructions of the
    special-function unit, which has eight cycles for each. Of scores far below, the polynomial makes too little, but less the
    lower they are: from LEAST_CAP on what that changes a probability by is under 2^-20 of the largest.
    """
    tile_max = _row_maxima(s, row_max, False)
    top = capped(tile_max, scales[1]) * scales[0]
    new_max = gl.where(top - row_max > GROWTH, top, row_max) if LAZY else gl.maximum(row_max, top)
    judged = gl.where(scales[0] < 2.0 * LEAST_CAP * 1.4426950408889634, float("inf"), tile_max)
    tops, same = gl.broadcast(gl.expand_dims(gl.convert_layout(judged, gl.SliceLayout(1, s.type.layout)), 1), s)
    over, same = gl.broadcast(gl.full([1, 1], scales[1], gl.float32, s.type.layout), s)
    s = gl.inline_asm_elementwise(_CAPPED, _CAPPED_OPERANDS, [s, tops, over], gl.float32, False, 64)
    return gl.exp2(s * scales[0] - gl.expand_dims(new_max, 1)), new_max, gl.exp2(row_max - new_max)
