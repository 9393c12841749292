"""ALiBi, masks and biases on scores in registers: the latter are read beside the product that makes the scores.

Strides of batches, heads and queries may be any, 0 among them. A thread's scores stand in pairs, eight rows of a warp beside
each other: a read of pairs costs eight look-ups in the cache. Where rows begin at 16 bytes an additive bias is read eight
elements at a time, a quarter as often, and brought to the layout of scores through 4 KiB of shared memory: of D 64 a call takes
13% less. Of masks, whose elements are half as wide, it would take up to 7% more (docs/notes/serving-on-an-h200.md).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

AT_ONCE = gl.constexpr(8)  # elements of an additive bias in one read, where all rows begin at a multiple of as many
EXCHANGE_BYTES = 4096  # of a consumer, to bring them to the layout of scores


@gluon.jit
def bias_rows(bias, batch, head, first_row, seqlen_q, ROWS: gl.constexpr, UNIT: gl.constexpr, scores: gl.constexpr):
    """Where the bias of each of a consumer's rows begins; past the last row: where the last one's does. ``UNIT``: how many
    elements are read at once."""
    if UNIT == AT_ONCE:
        wide: gl.constexpr = gl.BlockedLayout([1, AT_ONCE], [8, 4], [4, 1], [1, 0])
        return _bias_rows(bias, batch, head, first_row, seqlen_q, ROWS, UNIT, wide)
    else:
        return _bias_rows(bias, batch, head, first_row, seqlen_q, ROWS, UNIT, scores)


@gluon.jit
def _bias_rows(bias, batch, head, first_row, seqlen_q, ROWS: gl.constexpr, UNIT: gl.constexpr, layout: gl.constexpr):
    base, slopes, stride_slopes, stride_b, stride_h, stride_m = bias
    row = gl.minimum(first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), seqlen_q - 1).to(gl.int64)
    of_head = batch.to(gl.int64) * (stride_b // UNIT * UNIT) + head.to(gl.int64) * (stride_h // UNIT * UNIT)
    return base + (of_head + row * (stride_m // UNIT * UNIT))


@gluon.jit
def start_bias(rows, first_key, seqlen_k, BLOCK_N: gl.constexpr, ENDS: gl.constexpr):
    """The bias of a tile of keys, as it is read, before scores are there to wait for. ``ENDS``: keys may end in it."""
    layout: gl.constexpr = rows.type.layout.parent
    key = gl.expand_dims(first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout)), 0)
    at = gl.expand_dims(rows, 1) + key
    if ENDS:
        return gl.load(at, mask=key < seqlen_k, other=0)
    else:
        return gl.load(at)


@gluon.jit
def biased(s, drawn, scale_log2):
    """Scores with the bias, and what a softmax is to scale them by: not at all once something was added to them."""
    drawn = gl.convert_layout(drawn, s.type.layout)
    if drawn.dtype == gl.uint8:
        return gl.where(drawn != 0, s, float("-inf")), scale_log2
    else:
        # Rounded to zero, as the lowest number of bf16, by which models hide keys, would be -inf: where a row has no other, its
        # output is the mean of all values. -inf stays.
        more = gl.inline_asm_elementwise(
            "mul.rz.f32 $0, $1, 0f3FB8AA3B;", "=f,f", [drawn.to(gl.float32)], gl.float32, True, 1
        )
        return s * scale_log2 + more, 1.0


@gluon.jit
def with_alibi(s, scale_log2, of_rows, first_key):
    """Scores less the slope for each key between theirs and their query's own, and what a softmax is to scale them by: nothing.
    ``of_rows``: the slope, and each row's own key. Of a column's number what differs between registers is a constant."""
    slope, place = of_rows[0], of_rows[1] - first_key
    column = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)
    apart = (gl.expand_dims(place, 1) - (column & 6)).to(gl.float32) - (column & ~6).to(gl.float32)
    return s * scale_log2 - slope * gl.abs(apart), 1.0
