"""The soft cap of scores in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh, right to 2e-7 of 1 and up to 0.62 to 1e-7 of itself: there by a minimax polynomial, above by an exponential."""
    square = x * x
    odd = -0.33333283 + square * (0.13331454 + square * (-0.05374067 + square * (0.020642346 - square * 0.0057087843)))
    small = x + x * (square * odd)
    large = 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * x) + 1.0)
    return tl.where(square < 0.39, small, large)
