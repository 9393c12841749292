"""Masks on scores [BLOCK_M, BLOCK_N] in registers: -inf where a row does not see a key."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def columns_before(s, limit):
    """Which columns of scores are before ``limit``, one number or [rows, 1].

    Of a column's number, the part that differs between a thread's registers is a constant to the compiler. The part that
    differs between threads is taken from the limit: two subtractions a thread, and for each score a comparison with a constant.
    With numbers of columns in registers the assembler also orders the loop over keys to save registers, which took 9%.
    """
    column = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)
    return (column & ~6) < limit - (column & 6)  # a row's four threads hold two columns of eight each


@gluon.jit
def mask_keys(s, first_key, first_row, span, QUERIES: gl.constexpr, CAUSAL: gl.constexpr):
    """-inf where a key is not among those that its row sees.

    Args:
        span: queries and keys of the sequence; from a row to the last key that it sees when causal; how many keys every row
            sees then, or None; how many a row sees before its own place, the bottom right aligned, or None for all.
        QUERIES: after so many rows come the same queries of the next head.
    """
    seqlen_q, seqlen_k, to_last, prefix, left = span
    limit = seqlen_k - first_key
    if CAUSAL or left is not None:
        row = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        if s.shape[0] > QUERIES:
            row = row % QUERIES
        row = first_row + row
    if CAUSAL:
        own = row + to_last + 1 - first_key
        if prefix is not None:
            own = gl.maximum(own, prefix - first_key)
        limit = gl.expand_dims(gl.minimum(own, limit), 1)
    seen = columns_before(s, limit)
    if left is not None:
        seen &= columns_before(s, gl.expand_dims(row + seqlen_k - seqlen_q - left - first_key, 1)) == 0
    return gl.where(seen, s, float("-inf"))
