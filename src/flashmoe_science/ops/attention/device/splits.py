"""Split-KV on the host: how many splits the keys of a launch go into, and the bytes of their partials."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from flashmoe_science.ops.launch import cdiv

MAX_SPLITS = 128
MAX_ORDERED = 64  # sequences whose lengths every program compares


class Work(NamedTuple):
    """What a grid is made for: sequences times key heads, tiles of rows of each, tiles of keys that a tile of rows sees."""

    heads: int
    tiles_m: int
    tiles_n: int


@lru_cache(4096)
def num_splits(work: Work, min_tiles: int, asked: int, sm_count: int, occupancy: int) -> int:
    """The number of splits of the keys, of at least ``min_tiles`` tiles each: ``asked`` if not 0, else by a model.

    The model counts steps of a tile of keys: programs run in waves of ``occupancy`` an SM, each for its tiles and a step or so
    to begin and to end; merging adds a little for each split.
    """
    max_splits = max(1, min(MAX_SPLITS, cdiv(work.tiles_n, min_tiles)))
    if asked:
        return min(asked, max_splits)
    programs, slots = work.heads * work.tiles_m, sm_count * occupancy
    max_splits = min(max_splits, max(1, cdiv(2 * slots, programs)))
    return min(range(1, max_splits + 1), key=lambda splits: _steps(work.tiles_n, programs, splits, slots))


def _steps(tiles: int, programs: int, splits: int, slots: int) -> float:
    merge = 0.0 if splits == 1 else 1.0 + 0.02 * splits
    return cdiv(programs * splits, slots) * (cdiv(tiles, splits) + 1.0) + merge


def partial_bytes(rows: int, splits: int, width_v: int) -> int:
    """Bytes of the fp32 outputs, maxima and sums of all splits of ``rows`` packed rows."""
    return 0 if splits == 1 else 4 * rows * splits * (width_v + 2)
