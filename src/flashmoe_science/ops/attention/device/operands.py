"""Records of a call's tensors, for device code, and where their tiles lie."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """A tensor [batch, heads, rows, width], contiguous in its last dimension: its address and its other strides."""

    base: tl.tensor
    stride_b: tl.tensor
    stride_h: tl.tensor
    stride_m: tl.tensor


@triton.jit
def tile_at(tensor, batch, head, row):
    """Where a row of ``tensor``, Rows, begins. Numbers whose products with strides may need 64 bits have them."""
    return tensor.base + batch * tensor.stride_b + head * tensor.stride_h + row * tensor.stride_m
