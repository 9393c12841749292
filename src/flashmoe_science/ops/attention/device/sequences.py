"""Sequence look-up: where a sequence's queries and keys begin, how many there are, and which cache is its own."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def packed_rows(cu_seqlens, batch, rows):
    """The first row of a sequence and how many it has; from 0 on and ``rows`` where sequences are not packed."""
    first = 0
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + batch)
        rows = tl.load(cu_seqlens + batch + 1) - first
    return first, rows


@triton.jit
def keys_of(cu_seqlens_k, cache_seqlens, batch, seqlen_k, before, new):
    """The first row of a sequence's packed keys, how many keys it has, and how many of them are in its cache before ``new``
    ones are appended: ``before`` more than ``cache_seqlens``."""
    begin = before
    first_k, keys = packed_rows(cu_seqlens_k, batch, seqlen_k)
    if cu_seqlens_k is not None:
        if cache_seqlens is not None:
            keys = tl.minimum(tl.load(cache_seqlens + batch), keys)
    else:
        if cache_seqlens is not None:
            begin += tl.load(cache_seqlens + batch)
        keys = tl.minimum(begin + new, keys)  # never past the capacity
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
