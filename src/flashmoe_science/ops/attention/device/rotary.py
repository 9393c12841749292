"""Rotary embedding of rows as they are loaded. Su et al. 2021."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotary_position(position, positions):
    """A position as a row of the tables, of which there are ``positions``: int64."""
    return tl.minimum(tl.maximum(position, 0), positions - 1).to(tl.int64)


@triton.jit
def load_rotated(source, offsets, inside, dims, cos, sin, position, stride_cos, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load rows at ``offsets`` from ``source``, rotated by ``position``: fp32 [rows, dims]."""
    x = tl.load(source + offsets[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    if INTERLEAVED:
        partner, angle, second = dims ^ 1, dims // 2, dims % 2 == 1
    else:
        partner, angle, second = tl.where(dims < HALF, dims + HALF, dims - HALF), dims % HALF, dims >= HALF
    turned = inside & (dims < 2 * HALF)[None, :]
    y = tl.load(source + offsets[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
    angles = (position * stride_cos)[:, None] + angle[None, :]
    c = tl.load(cos + angles, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angles, mask=turned, other=0.0).to(tl.float32)
    return x * c + tl.where(second[None, :], y, -y) * s
