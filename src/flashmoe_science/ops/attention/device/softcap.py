"""The soft cap of scores, cap * tanh(s / cap), in registers."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.attention.device.softmax import GROWTH, as_column, row_maxima


class Scales(NamedTuple):
    """What scores are multiplied by."""

    log2: Any  # by a softmax, of base 2
    cap: Any  # by ``capped``; None without a cap


@gluon.jit
def capped_scales(softmax_scale, softcap):
    """The Scales of scores with a soft cap."""
    scale_log2 = softmax_scale * 1.4426950408889634
    return Scales(2.0 * softcap * 1.4426950408889634, 2.0 * scale_log2 / softcap)


@gluon.jit
def capped(s, scale):
    """(tanh(x) - 1) / 2 of the scores over the cap: -1 / (1 + e^(2 x)), with ``scale`` from a product Q K^T to log2 of e^(2 x).

    The softmax takes it times twice the cap: scores less the cap, which changes their maximum alone. Two instructions of the
    special-function unit and two others. A score is off by 2^-21 of the cap at the most, however small it is; what a softmax
    makes of scores follows from their differences.
    """
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [-1.0 - gl.exp2(s * scale)], gl.float32, True, 1)


@gluon.jit
def uncapped_max(row_max, scales):
    """Maxima of rows with what ``capped`` leaves out of scores."""
    if scales.cap is not None:
        row_max += 0.5 * scales.log2
    return row_max


# tanh(x) / 2 = y P(y^2) with y = 2 x, for |y| below the first number: P's coefficients, the lowest power first, fitted to the
# least largest error, which for tanh is 2^-21. P rises for all y.
_HALF_TANH = (
    (0.69, (0.24999774992465973, -0.020794933661818504, 0.0019182744435966015)),
    (1.6, (0.2499987781047821, -0.020823391154408455, 0.002060346771031618, -1.8852073117159307e-04, 1.1195946171937976e-05)),
)
MIN_CAP = gl.constexpr(30.0)  # from which on scores far below a row's maximum count for nothing, whatever P makes of them


def _bits(number: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', number))[0]:08X}"


def _capped_asm(count: int) -> str:
    """PTX for what ``capped`` gives of a thread's ``count`` scores, in place.

    A thread holds two rows, alternating two scores of each. The operands are the scores, then the rows' largest ones (operand
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

    The largest score of a row stays the largest under a cap. Where those of a warp are small against the cap, no score is far
    above them, and a polynomial caps them: four or six multiply-adds a score, where ``capped`` takes two instructions of the
    special-function unit, which has eight cycles for each. Of scores far below, the polynomial makes too little, but less the
    lower they are: from MIN_CAP on what that changes a probability by is under 2^-20 of the largest.
    """
    tile_max = row_maxima(s, row_max, False)
    top = capped(tile_max, scales.cap) * scales.log2
    new_max = gl.where(top - row_max > GROWTH, top, row_max) if LAZY else gl.maximum(row_max, top)
    judged = gl.where(scales.log2 < 2.0 * MIN_CAP * 1.4426950408889634, float("inf"), tile_max)
    tops, same = gl.broadcast(as_column(judged, s), s)
    over, same = gl.broadcast(gl.full([1, 1], scales.cap, gl.float32, s.type.layout), s)
    s = gl.inline_asm_elementwise(_CAPPED, _CAPPED_OPERANDS, [s, tops, over], gl.float32, False, 64)
    return gl.exp2(s * scales.log2 - gl.expand_dims(new_max, 1)), new_max, gl.exp2(row_max - new_max)
