"""Which keys a program of split_triton.py or decode_gluon.py takes: a piece of a sequence's tiles, or those of its range.

Where every program reads the lengths of all sequences, either pieces of sequences, the longest sequence first, or equal ranges
of the keys of all sequences, where one is much longer than the others. The main kernels and the merge (merge_triton.py) decide
between the two by the same functions. ``numbers`` are those of the sequences, from 0 on, and of some past them: a power of two
of them, which the caller makes, as Gluon's vectors have a layout and Triton's have none.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tiles_between(start, end, BLOCK_N: tl.constexpr, BEGINS: tl.constexpr):
    """The first tile of keys from ``start`` to before ``end``, and how many there are. BEGINS: ``start`` may be past 0."""
    first_tile = start // BLOCK_N
    tiles = tl.cdiv(end, BLOCK_N) - first_tile
    if BEGINS:
        tiles = tl.where(end > start, tiles, 0)
    return first_tile, tiles


@triton.jit
def pieces_of(tiles, splits, MIN_TILES: tl.constexpr):
    """Into how many pieces so many tiles are split: none has fewer than MIN_TILES, but where it is the only one."""
    return tl.maximum(tl.minimum(splits, tl.cdiv(tiles, MIN_TILES)), 1)


@triton.jit
def at_place(own, others, row, column, numbers, place):
    """The sequence at a place, from 0 on, in the order of lengths, the longest first and equal ones as they come. ``own`` and
    ``row`` are the lengths and numbers of sequences in a column, ``others`` and ``column`` the same in a row."""
    before = (others > own) | ((others == own) & (column < row))
    places = tl.sum(before.to(tl.int32), 1)
    return tl.sum(tl.where(places == place, numbers, 0), 0)


@triton.jit
def longest(cache_seqlens, place, batches, numbers, others_numbers):
    """``at_place`` of ``batches`` sequences. Lengths may be negative: what is past the sequences comes after all."""
    row, column = numbers[:, None], others_numbers[None, :]
    own = tl.load(cache_seqlens + row, mask=row < batches, other=-2147483648)
    others = tl.load(cache_seqlens + column, mask=column < batches, other=-2147483648)
    return at_place(own, others, row, column, numbers, place)


@triton.jit
def tiles_of(cache_seqlens, leftpads, batch, batches, before, new, capacity, BLOCK_N: tl.constexpr, CACHED: tl.constexpr):
    """How many tiles have keys of sequences, none of those past ``batches``. CACHED: lengths may come from the SM's cache."""
    modifier: tl.constexpr = "" if CACHED else ".cg"
    length = before + tl.load(cache_seqlens + batch, mask=batch < batches, other=0, cache_modifier=modifier) + new
    tiles = tl.cdiv(tl.maximum(tl.minimum(length, capacity), 0), BLOCK_N)
    if leftpads is not None:
        pad = tl.load(leftpads + batch, mask=batch < batches, other=0, cache_modifier=modifier)
        tiles = tl.maximum(tiles - tl.maximum(pad, 0) // BLOCK_N, 0)
    return tl.where(batch < batches, tiles, 0)


@triton.jit
def takes_ranges(tiles, even_slope, even_least):
    """Whether programs take equal ranges of all sequences' keys, and the tiles of all. Both kernels ask, and must decide alike:
    one operation, which no compiler takes apart."""
    total = tl.sum(tiles, 0)
    return tl.max(tiles, 0).to(tl.float32) > tl.fma(even_slope, total.to(tl.float32), even_least), total


@triton.jit
def sequences_in(tiles, total, number, ranges, batches, numbers, MIN_TILES: tl.constexpr):
    """Of the ``number``-th of equal ranges of the tiles of all sequences, ``total``: its first sequence and the one past its
    last, the unit at which the first begins, the units of the range, from one to before the other, and all units.

    A sequence is as many units as it has tiles, and before them MIN_TILES for the time that it takes to begin. No piece has
    fewer than 2 * MIN_TILES tiles where its sequence has more: a range that would end before so many does not begin that
    sequence, or takes the rest of it.
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
    """Of a sequence's ``tiles_in`` tiles, which begin at ``first_tile``, a range's piece: its first tile and the one past its
    last, and whether it has the sequence's first and its last tile. The range itself is from ``low_tile`` to ``high_tile``."""
    from_start, to_end = low_tile < 2 * MIN_TILES, tiles_in - high_tile < 2 * MIN_TILES
    low = first_tile + tl.where(from_start, 0, low_tile)
    return low, first_tile + tl.where(to_end, tiles_in, high_tile), from_start, to_end


@triton.jit
def tell(partials, all_rows, places, batch, number, end, ranges, units, DV: tl.constexpr, MIN_TILES: tl.constexpr):
    """Tell the merge the first place of a sequence's partials and how many they are: its first piece is in the ``number``-th
    range, and ``end`` is the unit past its last."""
    last = ((end - 2 * MIN_TILES + 1) * ranges - 1) // units
    pieces = tl.maximum(tl.minimum(last, ranges - 1) - number, 0) + 1
    place = batch + number
    told = partials + tl.cast(all_rows, tl.int64) * places * (DV + 2) + 2 * batch
    tl.store(told, place.to(tl.float32))
    tl.store(told + 1, pieces.to(tl.float32))
