"""A tensor as kernels' entries pack it: its address and its strides."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Strided(NamedTuple):
    """A tensor [batch, heads, rows, width] or [batch, heads]: its address, or None, and its strides. Without ``stride_n`` the
    last dimension is contiguous."""

    base: tl.tensor
    stride_b: tl.tensor
    stride_h: tl.tensor
    stride_m: tl.tensor | None = None
    stride_n: tl.tensor | None = None


@triton.jit
def in_units(of_batch, of_head, of_row, UNIT: tl.constexpr):
    """Strides, which the compiler then knows to be multiples of ``UNIT`` (see stride_unit)."""
    if UNIT == 1:
        return of_batch, of_head, of_row
    else:
        return of_batch // UNIT * UNIT, of_head // UNIT * UNIT, of_row // UNIT * UNIT
