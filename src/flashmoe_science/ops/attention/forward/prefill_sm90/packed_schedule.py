"""The list of tiles of queries of packed sequences, made on the device that holds their lengths, for the tile scheduler.

The list is int32 rows of eight: first how many tiles were scheduled so far (0) and how many there are, then of each tile its
sequence, the first of the sequence's tiles and how many it has, where its queries end among the packed ones and how many they
are, and the same two of its keys. It is in LPT order: sequences of the most keys come first, so that tiles, scheduled one by
one, end at about the same time (Graham 1969).

The rest, rows of queries past the last sequence, is one more, of -1 keys: it sees none, and no sink either. It is the last in
the list, where its number is the last sequence's, whose slopes and the like are there to be read.

A program lists one sequence's tiles. Where they begin it counts for itself, so that no program waits for another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.launch import Build, Pointer

NUMBERS_OF_TILE = 8  # seven of them in use: 32 bytes, a sector
WARPS = 2
_BLOCK = 256  # sequences that are compared at once


@triton.jit
def _lengths(cu_seqlens, batch, batches, end):
    """Where sequences begin and end: the rest at ``end``, and all that follow it, without a row, there."""
    begins = tl.load(cu_seqlens + batch, mask=batch <= batches, other=end)
    return begins, tl.load(cu_seqlens + batch + 1, mask=batch < batches, other=end)


@triton.jit
def _keys_of(cu_seqlens_k, seqused_k, most_keys, batch, batches):
    """Where keys of sequences begin, and how many there are: in a cache ``seqused_k``; -1 of the rest."""
    first = 0
    keys = most_keys
    if cu_seqlens_k is not None:
        first, end = _lengths(cu_seqlens_k, batch, batches, 0)
        keys = end - first
    if seqused_k is not None:
        keys = tl.minimum(tl.load(seqused_k + batch, mask=batch < batches, other=0), keys)
    return first, tl.where(batch < batches, tl.maximum(keys, 0), -1)


@triton.jit(do_not_specialize=("batches", "total", "most_keys", "capacity"))
def flashmoe_packed_tiles_triton(
    tiles, cu_seqlens_q, cu_seqlens_k, seqused_k, batches, total, most_keys, capacity,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, NUMBERS: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """List the tiles of ``ROWS`` of the ``total`` rows of queries, at the most ``capacity`` of them whatever the lengths."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    batch = tl.program_id(0)
    begin_q, end_q = _lengths(cu_seqlens_q, batch, batches, total)
    begin_k, keys = _keys_of(cu_seqlens_k, seqused_k, most_keys, batch, batches)
    first = 0
    listed = 0
    for start in range(0, batches + 1, BLOCK):
        other = start + tl.arange(0, BLOCK)
        begin, end = _lengths(cu_seqlens_q, other, batches, total)
        _, others = _keys_of(cu_seqlens_k, seqused_k, most_keys, other, batches)
        count = tl.maximum(end - begin + ROWS - 1, 0) // ROWS
        before = (others > keys) | ((others == keys) & (other < batch))
        first += tl.sum(tl.where(before, count, 0))
        listed += tl.sum(count)
    if batch == 0:
        tl.store(tiles, 0)
        tl.store(tiles + 1, tl.minimum(listed, capacity))
    queries = tl.maximum(end_q - begin_q, 0)
    count = tl.minimum((queries + ROWS - 1) // ROWS, capacity - first)
    for start in range(0, count, BLOCK):
        nth = start + tl.arange(0, BLOCK)
        ok = nth < count
        at = tiles + NUMBERS * (1 + first + nth)
        tl.store(at, tl.minimum(batch, batches - 1), mask=ok)
        tl.store(at + 1, first, mask=ok)
        tl.store(at + 2, count, mask=ok)
        tl.store(at + 3, end_q, mask=ok)
        tl.store(at + 4, queries, mask=ok)
        tl.store(at + 5, begin_k + keys, mask=ok)
        tl.store(at + 6, keys, mask=ok)


def max_tiles(total: int, batches: int, rows: int) -> int:
    """The most tiles of ``rows`` rows that ``total`` queries fill, those of ``batches`` sequences and the rest."""
    return total // rows + batches + 1


def numbers(tiles: int) -> int:
    """int32 numbers of a list of ``tiles`` tiles."""
    return NUMBERS_OF_TILE * (1 + tiles)


def list_of_tiles(rows: int, packed_keys: bool, seqused: bool, early: bool) -> Callable[..., None]:
    """The launch that lists tiles of ``rows`` rows: (grid, the list, cu_seqlens_q, cu_seqlens_k or None, seqused_k or None,
    sequences, rows of queries, the most keys of a sequence in a cache, the most tiles). The grid is a program for each sequence
    and one for the rest."""
    lengths, constexprs = Pointer(torch.int32, 4), (rows, _BLOCK, NUMBERS_OF_TILE, early)
    of_keys = (lengths if packed_keys else None, lengths if seqused else None)
    arguments = (Pointer(torch.int32), lengths, *of_keys, 2, 2, 2, 2, *constexprs)
    start = Build(flashmoe_packed_tiles_triton, arguments, num_warps=WARPS, launch_pdl=early).launch
    return lambda grid, *values: start(grid, *values, *constexprs)
