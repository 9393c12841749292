"""Additive biases on scores, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bias_log2(bias):
    """What an additive bias adds to scores of base 2. Not below what fp32 holds: a row of nothing but bf16's lowest number has
    the mean of all values. -inf stays."""
    more = bias.to(tl.float32)
    return tl.where(more == float("-inf"), more, tl.maximum(more, -2.3e38) * 1.4426950408889634)
