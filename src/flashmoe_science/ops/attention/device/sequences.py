"""Sequence look-up: where a sequence's queries and keys begin, how many there are, and which cache is its own.

Packed queries may be in a buffer of a fixed length, whose rows past the last sequence are the rest: their output is zeros and
their log-sum-exp -inf. fwd_gluon_sm90 lists their tiles as of one more sequence, without keys. Of kernels whose grid follows
the longest sequence, the one that writes the output (the merge, where keys are split) writes the rest: each program a share.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Sequences(NamedTuple):
    """The layout of a call's sequences in memory; tensors of int32, or None.

    cu_seqlens_q, cu_seqlens_k: [batch + 1], the first rows of packed sequences.
    cache_seqlens: [batch], keys in each cache. cache_batch_idx: [batch], the row of the cache of each sequence.
    leftpads: [batch], how many of a sequence's first keys are padding.
    page_table: [batch, pages of a sequence], ``stride_table`` from a sequence to the next.
    seqlen_q: the most queries; seqlen_k: the keys, or the capacity, past which nothing is read.
    before: keys more than ``cache_seqlens``; new: rows that are appended.
    """

    cu_seqlens_q: tl.tensor
    cu_seqlens_k: tl.tensor
    cache_seqlens: tl.tensor
    cache_batch_idx: tl.tensor
    leftpads: tl.tensor
    page_table: tl.tensor
    stride_table: tl.tensor
    seqlen_q: tl.tensor
    seqlen_k: tl.tensor
    before: tl.tensor
    new: tl.tensor


@triton.jit
def packed_rows(cu_seqlens, batch, rows):
    """The first row of a sequence and how many it has; from 0 on and ``rows`` where sequences are not packed."""
    first = 0
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + batch)
        rows = tl.load(cu_seqlens + batch + 1) - first
    return first, rows


@triton.jit
def write_rest(out, lse, stride_oh, stride_om, cu_seqlens, batches, total, heads, pair, dim, DV: tl.constexpr):
    """Write this program's share of the rest of ``total`` packed rows: zeros, and -inf in ``lse``, [heads, total] or None.

    ``pair`` [N]: from 0 on, the pairs of a row and a head that are written at once; ``dim`` [width]: columns, DV or more. They
    are the caller's, as Gluon's vectors have a layout and Triton's have none.
    """
    first = tl.load(cu_seqlens + batches)
    count = (total - first) * heads
    program, programs = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0), tl.num_programs(0) * tl.num_programs(1)
    for begin in range(program * pair.shape[0], count, programs * pair.shape[0]):
        nth = begin + pair
        row, head, ok = (first + nth // heads).to(tl.int64), (nth % heads).to(tl.int64), nth < count
        inside = ok[:, None] & (dim < DV)[None, :]
        tl.store(out + (head * stride_oh + row * stride_om)[:, None] + dim[None, :], 0.0, mask=inside)
        if lse is not None:
            tl.store(lse + head * total + row, float("-inf"), mask=ok)


@triton.jit
def keys_of(sequences, batch):
    """The first row of a sequence's packed keys, how many keys it has, and how many of them were in its cache before new ones
    are appended."""
    begin = sequences.before
    first_k, keys = packed_rows(sequences.cu_seqlens_k, batch, sequences.seqlen_k)
    if sequences.cu_seqlens_k is not None:
        if sequences.cache_seqlens is not None:
            keys = tl.minimum(tl.load(sequences.cache_seqlens + batch), keys)
    else:
        if sequences.cache_seqlens is not None:
            begin += tl.load(sequences.cache_seqlens + batch)
        keys = tl.minimum(begin + sequences.new, keys)  # never past the capacity
    return first_k, keys, begin


@triton.jit
def cache_of(cache_batch_idx, batch):
    """The row of the cache that is a sequence's: int64."""
    cache = tl.cast(batch, tl.int64)
    if cache_batch_idx is not None:
        cache = tl.load(cache_batch_idx + batch).to(tl.int64)
    return cache


@triton.jit
def left_padding(leftpads, batch):
    """How many of a sequence's first keys are padding."""
    return tl.maximum(tl.load(leftpads + batch), 0)
