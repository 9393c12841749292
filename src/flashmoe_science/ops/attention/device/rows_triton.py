"""Rows of a tensor, loaded in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(head, offsets, inside, dims, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows of K or V at ``offsets`` from ``head``; zeros where not ``inside``: what a cache holds there may be NaN."""
    pointers = head + offsets[:, None] + dims[None, :]
    if MASKED:
        if D == BLOCK_D:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        return tl.load(pointers, mask=inside[:, None] & (dims[None, :] < D), other=0.0)
    if D == BLOCK_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=dims[None, :] < D, other=0.0)
