"""A boolean mask or an additive bias on scores in registers, read from device memory beside the product that makes them.

Each thread reads what belongs to its own scores, two neighbouring elements at a time: no shared memory, any strides of batches,
heads and queries, 0 among them. A bias of one row for all queries is read once by all rows of a warp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.launch import Pointer

PAIR = 2  # neighbouring scores of a thread
STRIDES = ("stride_bias_b", "stride_bias_h", "stride_bias_m")
_WIDE = 2**40  # a stride of 64 bits, as all are taken: one row may span 2^31 elements


@gluon.jit
def bias_rows(bias, batch, head, first_row, seqlen_q, ROWS: gl.constexpr, layout: gl.constexpr):
    """Where the bias of each of a consumer's rows begins, in a layout of rows; past the last row: where the last one's does."""
    base, stride_b, stride_h, stride_m, UNIT = bias
    row = gl.minimum(first_row + gl.arange(0, ROWS, layout), seqlen_q - 1).to(gl.int64)
    of_head = batch.to(gl.int64) * (stride_b // UNIT * UNIT) + head.to(gl.int64) * (stride_h // UNIT * UNIT)
    return base + (of_head + row * (stride_m // UNIT * UNIT))


@gluon.jit
def start_bias(rows, first_key, seqlen_k, BLOCK_N: gl.constexpr, ENDS: gl.constexpr):
    """The bias of a tile of keys in the layout of scores, before scores are there to wait for. ``ENDS``: keys may end in it."""
    scores: gl.constexpr = rows.type.layout.parent
    key = gl.expand_dims(first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores)), 0)
    at = gl.expand_dims(rows, 1) + key
    if ENDS:
        return gl.load(at, mask=key < seqlen_k, other=0)
    else:
        return gl.load(at)


@gluon.jit
def biased(s, drawn, scale_log2):
    """Scores with the bias, and what a softmax is to scale them by: not at all once something was added to them."""
    if drawn.dtype == gl.uint8:
        return gl.where(drawn != 0, s, float("-inf")), scale_log2
    else:
        # Rounded to zero, as the lowest number of bf16, by which models hide keys, would be -inf: where a row has no other, its
        # output is the mean of all values. -inf stays.
        more = gl.inline_asm_elementwise(
            "mul.rz.f32 $0, $1, 0f3FB8AA3B;", "=f,f", [drawn.to(gl.float32)], gl.float32, True, 1
        )
        return s * scale_log2 + more, 1.0


class BiasOf(NamedTuple):
    """A bias as a launch takes it; without one all None."""

    strides: tuple[int | None, int | None, int | None]
    unit: int  # elements that all rows begin at a multiple of, up to PAIR
    pointer: Pointer | None


NO_BIAS = BiasOf((None, None, None), 1, None)


def bias_of(bias: torch.Tensor | None) -> BiasOf:
    """What a launch depends on of a [batch, heads, seqlen_q, seqlen_k] bias. Raises CannotServe."""
    if bias is None:
        return NO_BIAS
    *strides, of_key = bias.stride()
    if of_key != 1:
        raise CannotServe(f"the bias has stride {of_key} from key to key; this kernel needs 1")
    dtype = torch.uint8 if bias.dtype == torch.bool else bias.dtype
    paired = all(stride % PAIR == 0 for stride in (*strides, bias.data_ptr() // dtype.itemsize))
    # Of 16 bytes where rows begin at pairs: pairs are all that is read, and need no more.
    return BiasOf(tuple(strides), PAIR if paired else 1, Pointer(dtype, 0 if paired else 1))


def stand_in_strides(bias: Pointer | None) -> tuple[int | None, ...]:
    """What stands in for the strides while a kernel is compiled."""
    return (None if bias is None else _WIDE,) * len(STRIDES)
