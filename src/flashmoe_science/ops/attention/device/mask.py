"""Masks on scores [BLOCK_M, BLOCK_N] in registers: -inf where a row does not see a key."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class MaskBounds(NamedTuple):
    """Which keys of a sequence its rows see."""

    seqlen_q: Any
    seqlen_k: Any
    diagonal: Any  # from a row to the last key that it sees under a causal mask
    prefix: Any = None  # how many keys every row sees under a causal mask, or None
    left: Any = None  # how many keys a row sees before its own place, the bottom right aligned, or None for all


@gluon.jit
def columns_before(s, limit):
    """Which columns of scores are before ``limit``, one number or [rows, 1].

    Of a column's number, the part that differs between a thread's registers is a constant to the compiler. The part that
    differs between threads is taken from the limit: two subtractions a thread, and for each score a comparison with a constant.
    With numbers of columns in registers the assembler also orders the loop over keys to save registers, which took 9%.
    """
    column = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)  # [1, BLOCK_N]
    return (column & ~6) < limit - (column & 6)  # a row's four threads hold two columns of eight each


@gluon.jit
def mask_keys(s, first_key, first_row, bounds, QUERIES: gl.constexpr, CAUSAL: gl.constexpr):
    """Scores with -inf where a key is not among those that its row sees. After ``QUERIES`` rows come the same queries of the
    next head."""
    end = bounds.seqlen_k - first_key
    if CAUSAL or bounds.left is not None:
        row = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))  # [BLOCK_M]
        if s.shape[0] > QUERIES:
            row = row % QUERIES
        row = first_row + row
    if CAUSAL:
        own = row + bounds.diagonal + 1 - first_key
        if bounds.prefix is not None:
            own = gl.maximum(own, bounds.prefix - first_key)
        end = gl.expand_dims(gl.minimum(own, end), 1)  # [BLOCK_M, 1]
    seen = columns_before(s, end)
    if bounds.left is not None:
        begin = row + bounds.seqlen_k - bounds.seqlen_q - bounds.left - first_key
        seen &= columns_before(s, gl.expand_dims(begin, 1)) == 0
    return gl.where(seen, s, float("-inf"))
