"""A tensor of a call as device code takes it, and where its tiles lie."""

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
def tile_at(tensor, batch, head, row):
    """Where a row of ``tensor``, Strided, begins. Numbers whose products with strides may need 64 bits have them."""
    return tensor.base + batch * tensor.stride_b + head * tensor.stride_h + row * tensor.stride_m
