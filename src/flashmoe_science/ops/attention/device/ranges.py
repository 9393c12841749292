"""Which keys a program of the split-KV kernels takes: a split of one sequence's tiles or, with stream-K, a range of all tiles.

Where the lengths of sequences differ every program reads all of them. Splits then start in LPT order (longest processing time
first, Graham 1969), or, where one sequence is much longer than the others, programs take equal ranges of the tiles of all
sequences (stream-K, Osama et al. 2023). The main kernels and merge_triton.py decide between the two by the same functions.
``numbers`` are those of the sequences, from 0 on, and of some past them: a power of two of them, which the caller makes, as
Gluon's vectors have a layout and Triton's have none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmoe_science.ops.attention.device.partials import split_info_at


@triton.jit
def tiles_between(start, end, BLOCK_N: tl.constexpr, BEGINS: tl.constexpr):
    """The first tile of keys from ``start`` to before ``end``, and how many there are. BEGINS: ``start`` may be past 0."""
    first_tile = start // BLOCK_N
    tiles = tl.cdiv(end, BLOCK_N) - first_tile
    if BEGINS:
        tiles = tl.where(end > start, tiles, 0)
    return first_tile, tiles


@triton.jit
def used_splits(tiles, splits, MIN_TILES: tl.constexpr):
    """How many of ``splits`` have keys: each has at least MIN_TILES of the tiles, unless it is the only one."""
    return tl.maximum(tl.minimum(splits, tl.cdiv(tiles, MIN_TILES)), 1)


@triton.jit
def index_in_lpt_order(own, others, row, column, numbers, index):
    """The sequence at ``index`` in the order of lengths, the longest first and equal ones as they come. ``own`` and ``row``
    [N, 1] are the lengths and numbers of sequences, ``others`` and ``column`` [1, N] the same."""
    before = (others > own) | ((others == own) & (column < row))  # [N, N]
    ranks = tl.sum(before.to(tl.int32), 1)  # [N]
    return tl.sum(tl.where(ranks == index, numbers, 0), 0)


@triton.jit
def sequence_by_length(cache_seqlens, index, batches, numbers, others_numbers):
    """``index_in_lpt_order`` of ``batches`` sequences. Lengths may be negative: what is past the sequences comes after all."""
    row, column = numbers[:, None], others_numbers[None, :]
    own = tl.load(cache_seqlens + row, mask=row < batches, other=-2147483648)
    others = tl.load(cache_seqlens + column, mask=column < batches, other=-2147483648)
    return index_in_lpt_order(own, others, row, column, numbers, index)


@triton.jit
def tiles_of(sequences, batch, batches, BLOCK_N: tl.constexpr, CACHED: tl.constexpr):
    """How many tiles have keys of sequences; none those past ``batches``. CACHED: lengths may be read from the SM's L1."""
    modifier: tl.constexpr = "" if CACHED else ".cg"
    own = tl.load(sequences.cache_seqlens + batch, mask=batch < batches, other=0, cache_modifier=modifier)
    length = sequences.before + own + sequences.new
    tiles = tl.cdiv(tl.maximum(tl.minimum(length, sequences.seqlen_k), 0), BLOCK_N)
    if sequences.leftpads is not None:
        pad = tl.load(sequences.leftpads + batch, mask=batch < batches, other=0, cache_modifier=modifier)
        tiles = tl.maximum(tiles - tl.maximum(pad, 0) // BLOCK_N, 0)
    return tl.where(batch < batches, tiles, 0)


@triton.jit
def use_stream_k(tiles, even_slope, even_least):
    """Whether programs take ranges of all sequences' tiles, and how many those are. The main kernel and the merge must decide
    alike: a single fma, so that both compilers round alike."""
    total = tl.sum(tiles, 0)
    return tl.max(tiles, 0).to(tl.float32) > tl.fma(even_slope, total.to(tl.float32), even_least), total


@triton.jit
def sequences_in(tiles, total, number, ranges, batches, numbers, MIN_TILES: tl.constexpr):
    """Of the ``number``-th of equal ranges of the tiles of all sequences, ``total``: its first sequence and the one past its
    last, the unit at which the first begins, the units of the range, from one to before the other, and all units.

    A sequence is as many units as it has tiles, and before them MIN_TILES for the time that it takes to begin. No split has
    fewer than 2 * MIN_TILES tiles where its sequence has more: a range that would end before that does not begin the sequence,
    or takes the rest of it.
    """
    units = total + batches * MIN_TILES
    low = number * units // ranges
    high = tl.where(number < ranges - 1, (number + 1) * units // ranges, 1 << 30)
    own = tl.where(numbers < batches, tiles + MIN_TILES, 0)
    end = tl.cumsum(own, 0)
    enough = end - tiles + 2 * MIN_TILES
    passed = (numbers < batches) & (end - 2 * MIN_TILES < low) & (enough <= low)
    begun = (numbers < batches) & (enough <= high) & (number < ranges)
    first, past = tl.sum(passed.to(tl.int32), 0), tl.sum(begun.to(tl.int32), 0)
    return first, past, tl.sum(tl.where(passed, own, 0), 0), low, high, units


@triton.jit
def tiles_in_range(first_tile, low_tile, high_tile, tiles_in, MIN_TILES: tl.constexpr):
    """Of a sequence's ``tiles_in`` tiles, from ``first_tile`` on, the split in a range, which is from ``low_tile`` to before
    ``high_tile``: its first tile and the one past its last, and whether it has the sequence's first and its last tile."""
    from_start, to_end = low_tile < 2 * MIN_TILES, tiles_in - high_tile < 2 * MIN_TILES
    low = first_tile + tl.where(from_start, 0, low_tile)
    return low, first_tile + tl.where(to_end, tiles_in, high_tile), from_start, to_end


@triton.jit
def store_split_info(partials, batch, number, end, ranges, units, DV: tl.constexpr, MIN_TILES: tl.constexpr):
    """Store a sequence's first slot and its number of splits for the merge: its first split is in the ``number``-th range, and
    ``end`` is the unit past its last."""
    last = ((end - 2 * MIN_TILES + 1) * ranges - 1) // units
    splits = tl.maximum(tl.minimum(last, ranges - 1) - number, 0) + 1
    slot = batch + number
    info = split_info_at(partials, batch, DV)
    tl.store(info, slot.to(tl.float32))
    tl.store(info + 1, splits.to(tl.float32))
