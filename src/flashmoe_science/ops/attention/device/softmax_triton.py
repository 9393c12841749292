"""Online softmax in Triton: one step over a tile of scores, a sink's logit, and the log-sum-exp of a row.

A row's state is its maximum, scaled to an exponent of base 2, and its sum of exponentials. Online softmax: Milakov and
Gimelshein 2018.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN_SUM = 1024  # keys whose plain fp32 sum leaves the log-sum-exp right; it saves registers where tiles are thin


@triton.jit
def softmax_step(s, row_max, row_sum, lost, scale_log2, COMPENSATED: tl.constexpr):
    """One online-softmax step on scores [BLOCK_M, BLOCK_N]. Returns exp2(s * scale - max), the new running max and sum, what
    rounding took from the sum, and the old values' rescale. Not COMPENSATED for what is lost (Kahan 1965), a sum of 8192
    numbers of one size is off by 2e-6 of itself: of no account to an output of 16 bits, all of the error of a log-sum-exp.

    Maxima are kept scaled. Scaled anew in each step, the old one would meet the new one in a fused multiply-add that does not
    round it: the rescale would miss 1 by the rounding error where the maximum stays, and in every step by the same.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    # A row that has seen no key yet has a maximum of -inf; subtracting 0 instead keeps exp2(-inf) = 0 rather than NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s * scale_log2 - shift[:, None])  # [BLOCK_M, BLOCK_N]
    rescale = tl.exp2(row_max - shift)
    before = row_sum * rescale
    more = tl.sum(p, 1)  # [BLOCK_M]
    if COMPENSATED:
        more -= lost * rescale
    total = before + more
    if COMPENSATED:
        lost = (total - before) - more
    return p, new_max, total, lost, rescale


@triton.jit
def with_sink(sink, row_max, row_sum):
    """The maximum and the sum of rows with a logit more, and the old values' rescale."""
    sink = sink.to(tl.float32) * 1.4426950408889634
    new_max = tl.maximum(row_max, sink)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - shift)
    return new_max, row_sum * rescale + tl.exp2(sink - shift), rescale


@triton.jit
def log2_of_sum(x):
    """log2 of a sum of exponentials: 0, NaN, or 1 and more. The hardware's is off by 2^-22 of its value, 2e-6 at 8192 keys, so
    it is asked for the mantissa's alone."""
    bits = x.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(x > 0.0, ((bits >> 23) - 127).to(tl.float32) + tl.log2(mantissa), tl.log2(x))  # else 0 or NaN


@triton.jit
def log_sum_exp(row_max, row_sum):
    """Natural logarithm; -inf for an empty sum."""
    return (tl.where(row_max == float("-inf"), 0.0, row_max) + log2_of_sum(row_sum)) * 0.6931471805599453


@triton.jit
def add_part(found, value, highest, total, acc):
    """The highest natural log-sum-exp [rows], the sum of exponentials and the unscaled result [rows, columns], all fp32, with a
    part more: its log-sum-exp ``found`` and its result ``value``."""
    higher = tl.maximum(highest, found)
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    before, weight = tl.exp(highest - finite), tl.exp(found - finite)
    # An empty part weighs nothing, whatever lies there.
    value = tl.where(weight[:, None] == 0.0, 0.0, weight[:, None] * value)
    return higher, total * before + weight, acc * before[:, None] + value
