"""Rotary embedding of rows as they are loaded. Su et al. 2021."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class RotaryTables(NamedTuple):
    """Cosines and sines [positions, half of the rotated width], ``stride`` from a position to the next; ``seqlens`` [batch]:
    the position of each sequence's first new token, None for its length before."""

    cos: tl.tensor
    sin: tl.tensor
    seqlens: tl.tensor
    positions: tl.tensor
    stride: tl.tensor


@triton.jit
def first_position(rotary, batch, begin):
    """The position of a sequence's first new token; ``begin`` where ``rotary`` gives none."""
    position = begin
    if rotary.seqlens is not None:
        position = tl.load(rotary.seqlens + batch)
    return position


@triton.jit
def in_tables(rotary, position):
    """Positions as the tables have them, int64: those before the first and past the last are rotated as these."""
    return tl.minimum(tl.maximum(position, 0), rotary.positions - 1).to(tl.int64)


@triton.jit
def load_rotated(source, offsets, inside, dims, position, rotary, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load rows at ``offsets`` from ``source``, each rotated by its ``position`` in the tables: fp32 [rows, dims]. Pairs of
    columns are (i, i + HALF), or (0, 1), (2, 3).. where INTERLEAVED."""
    x = tl.load(source + offsets[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)  # [rows, dims]
    if INTERLEAVED:
        partner, angle, second = dims ^ 1, dims // 2, dims % 2 == 1
    else:
        partner, angle, second = tl.where(dims < HALF, dims + HALF, dims - HALF), dims % HALF, dims >= HALF
    turned = inside & (dims < 2 * HALF)[None, :]
    y = tl.load(source + offsets[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)  # [rows, dims]
    angles = (position * rotary.stride)[:, None] + angle[None, :]
    c = tl.load(rotary.cos + angles, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(rotary.sin + angles, mask=turned, other=0.0).to(tl.float32)
    return x * c + tl.where(second[None, :], y, -y) * s
