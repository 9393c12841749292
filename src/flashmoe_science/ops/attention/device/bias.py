"""ALiBi, boolean masks and additive biases on scores [BLOCK_M, BLOCK_N] in registers; masks and biases are read during Q K^T.

Strides of batches, heads and queries may be any, 0 among them. A thread's scores are pairs, of eight rows of a warp: a
read of pairs costs eight look-ups in the cache. Where rows begin at 16 bytes an additive bias is read eight
elements at a time, a quarter as often, and brought to the layout of scores through 4 KiB of shared memory: of D 64 a call takes
13% less. Of masks, whose elements are half as wide, it would take up to 7% more (docs/notes/serving-on-an-h200.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

AT_ONCE = gl.constexpr(8)  # elements of an additive bias in one read, where all rows begin at a multiple of 8
EXCHANGE_BYTES = 4096  # of a consumer, to bring them to the layout of scores


class Bias(NamedTuple):
    """A boolean mask or an additive bias [B, H, Sq, Sk], or ALiBi's slopes [B, H]; None where there is none."""

    base: Any
    slopes: Any
    stride_slopes: Any
    stride_b: Any
    stride_h: Any
    stride_m: Any


class AlibiRows(NamedTuple):
    """ALiBi of a consumer's rows: the slope of their head, to base 2, and the key at each row's own place, [BLOCK_M]."""

    slope: Any
    key: Any


@gluon.jit
def bias_rows(bias, batch, head, first_row, seqlen_q, ROWS: gl.constexpr, UNIT: gl.constexpr, scores: gl.constexpr):
    """Pointers to where the bias of each of a consumer's rows begins, [BLOCK_M]; past the last row: where the last one's does.
    ``UNIT``: how many elements are read at once."""
    layout: gl.constexpr = gl.BlockedLayout([1, AT_ONCE], [8, 4], [4, 1], [1, 0]) if UNIT == AT_ONCE else scores
    row = gl.minimum(first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), seqlen_q - 1).to(gl.int64)
    of_head = batch.to(gl.int64) * (bias.stride_b // UNIT * UNIT) + head.to(gl.int64) * (bias.stride_h // UNIT * UNIT)
    return bias.base + (of_head + row * (bias.stride_m // UNIT * UNIT))


@gluon.jit
def alibi_rows(slope_at, first_row, bounds, ROWS: gl.constexpr, scores: gl.constexpr):
    """The AlibiRows of a consumer's rows from ``first_row`` on, of the slope at a pointer."""
    slope = gl.load(slope_at) * 1.4426950408889634
    key = first_row + bounds.seqlen_k - bounds.seqlen_q + gl.arange(0, ROWS, gl.SliceLayout(1, scores))
    return AlibiRows(slope, key)


@gluon.jit
def load_bias(rows, first_key, seqlen_k, BLOCK_N: gl.constexpr, ENDS: gl.constexpr):
    """The bias of a tile of keys, [BLOCK_M, BLOCK_N], in the layout in which it is read, to be loaded before scores are waited
    for. ``ENDS``: keys may end in the tile."""
    layout: gl.constexpr = rows.type.layout.parent
    key = gl.expand_dims(first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout)), 0)  # [1, BLOCK_N]
    at = gl.expand_dims(rows, 1) + key
    if ENDS:
        return gl.load(at, mask=key < seqlen_k, other=0)
    else:
        return gl.load(at)


@gluon.jit
def add_bias(s, bias, scale_log2):
    """Scores with a tile of a bias, and the scale that a softmax is to take: 1 once something was added to scores."""
    bias = gl.convert_layout(bias, s.type.layout)
    if bias.dtype == gl.uint8:
        return gl.where(bias != 0, s, float("-inf")), scale_log2
    else:
        # Rounded to zero, as the lowest number of bf16, by which models hide keys, would be -inf: where a row has no other, its
        # output is the mean of all values. -inf stays.
        more = gl.inline_asm_elementwise(
            "mul.rz.f32 $0, $1, 0f3FB8AA3B;", "=f,f", [bias.to(gl.float32)], gl.float32, True, 1
        )
        return s * scale_log2 + more, 1.0


@gluon.jit
def add_alibi(s, scale_log2, rows, first_key):
    """Scores less the slope for each key between theirs and their query's own, and the scale that a softmax is to take: 1. Of a
    column's number what differs between registers is a constant."""
    column = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)  # [1, BLOCK_N]
    distance = (gl.expand_dims(rows.key - first_key, 1) - (column & 6)).to(gl.float32) - (column & ~6).to(gl.float32)
    return s * scale_log2 - rows.slope * gl.abs(distance), 1.0
