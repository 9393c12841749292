"""The rows of a mixture's products: (token, expert) pairs sorted by expert, and the tiles that cover them.

A row is one pair, token times top_k plus the place of the choice. Rows of one expert follow each other, in the order of their
pairs. Pairs whose id is below 0 or at least ``experts`` (other ranks' experts) get no row. One int32 tensor, ``tables``, has:

    pair_of_row [pairs], row_of_pair [pairs] (-1: none), offsets [experts + 1] (the first row of each expert, then the number of
    rows), tile_expert [tiles], tile_row [tiles] (a tile's first row), the number of tiles, counters [2] (of tiles, one for the
    persistent programs of each product, 0), counts [blocks, bins] if ``counted``

A tile is ``BLOCK_M`` rows of one expert, its last one fewer. Nothing waits for the host: tiles are bounded by the number of
pairs, and programs skip those past the device's count. One launch up to 2048 pairs, two above; nothing is atomic, so that equal
ids give equal tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.kernel import Launch
from flashmoe_science.ops.launch import Build, Pointer, cdiv, kept_build, next_power_of_2, stand_in
from flashmoe_science.ops.moe.call import KernelLaunch
from flashmoe_science.ops.moe.problem import MoEProblem

ONE_BLOCK = 512  # pairs up to which one program does all
MAX_EXPERTS = 4096
MAX_PAIRS = 2**26  # indices of the tables are counted in 32 bits, with room for every tile
MAX_UNCOUNTED_BLOCKS = 4  # up to which each program counts the pairs of all blocks, which saves a launch
_COUNTED_AT_ONCE = 8  # blocks whose counts are added in one step
_WARPS = 8


class Tables(NamedTuple):
    """Pointers to the parts of ``tables``."""

    pair_of_row: Any
    row_of_pair: Any
    offsets: Any
    tile_expert: Any
    tile_row: Any
    tile_count: Any
    counters: Any
    counts: Any


class Tile(NamedTuple):
    """The expert of a tile, its first row, the expert's last row + 1, and its column of tiles."""

    expert: Any
    row: Any
    end: Any
    column: Any


@triton.jit
def tables_of(tables, pairs, experts, tiles):
    """The parts of ``tables``."""
    offsets = tables + 2 * pairs
    tile_expert = offsets + experts + 1
    tile_row = tile_expert + tiles
    tile_count = tile_row + tiles
    return Tables(tables, tables + pairs, offsets, tile_expert, tile_row, tile_count, tile_count + 1, tile_count + 3)


@triton.jit
def tile_at(index, tables, tiles, COLUMNS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The tile scheduler: the ``Tile`` of ``BLOCK_M`` rows by one of ``COLUMNS`` columns at an index. Their order: all columns
    of a group of an expert's tiles, then those of its next group. An expert's groups are about equal, of at most ``GROUP``
    tiles. The column is -1 where the index is past the last tile."""
    tile = tl.minimum(index // COLUMNS, tiles - 1)
    exists = index < tl.load(tables.tile_count) * COLUMNS
    expert = tl.where(exists, tl.load(tables.tile_expert + tile), 0)
    row = tl.load(tables.tile_row + tile)
    first = tl.load(tables.offsets + expert)
    end = tl.load(tables.offsets + expert + 1)
    count = tl.maximum((end - first + BLOCK_M - 1) // BLOCK_M, 1)
    groups = (count + GROUP - 1) // GROUP
    size = (count + groups - 1) // groups
    nth = tl.where(exists, (row - first) // BLOCK_M, 0)
    start = nth // size * size
    height = tl.minimum(count - start, size)
    inside = index - (tile - nth + start) * COLUMNS
    return Tile(expert, first + (start + inside % height) * BLOCK_M, end, tl.where(exists, inside // height, -1))


@triton.jit
def _experts_of(ids, first, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """The experts of a block's pairs; EXPERTS where a pair has none here."""
    pair = first + tl.arange(0, BLOCK)  # [BLOCK]
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS).to(tl.int32)  # [BLOCK]


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_count(
    ids, tables, pairs, tiles,
    EXPERTS: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """Count the pairs of each expert in each block."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    expert = _experts_of(ids, block * BLOCK, pairs, EXPERTS, BLOCK)
    counts = tables_of(tables, pairs, EXPERTS, tiles).counts
    tl.store(counts + block * IDS + tl.arange(0, IDS), tl.histogram(expert, IDS))  # [IDS]


@triton.jit(do_not_specialize=["pairs", "tiles", "blocks"])
def flashmoe_moe_rows(
    ids, tables, pairs, tiles, blocks,
    EXPERTS: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr,
    COUNTED: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """Write the tables: each program its block of pairs, and its share of the tiles. ``COUNTED``: by flashmoe_moe_count."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    parts = tables_of(tables, pairs, EXPERTS, tiles)
    expert = _experts_of(ids, block * BLOCK, pairs, EXPERTS, BLOCK)  # [BLOCK]
    number = tl.arange(0, IDS)  # [IDS]
    own = tl.histogram(expert, IDS)  # [IDS]
    total = own  # [IDS], of all blocks
    before = tl.zeros([IDS], tl.int32)  # of the blocks before this one
    if not COUNTED:
        for nth in range(1, blocks):
            other = (block + nth) % blocks
            count = tl.histogram(_experts_of(ids, other * BLOCK, pairs, EXPERTS, BLOCK), IDS)  # [IDS]
            total += count
            before += tl.where(other < block, count, 0)
    else:
        total = tl.zeros([IDS], tl.int32)
        for first in range(0, blocks, STEP):
            other = first + tl.arange(0, STEP)[:, None]  # [STEP, 1]
            count = tl.load(parts.counts + other * IDS + number[None, :], mask=other < blocks, other=0)  # [STEP, IDS]
            total += tl.sum(count, 0)
            before += tl.sum(tl.where(other < block, count, 0), 0)
    first_row = tl.cumsum(total, 0) - total  # [IDS]

    # A sort that keeps the order of pairs: the place of a pair among its block's, and from where its expert begins there. To
    # compare each pair with all others took 130 us where this takes 27 (131072 pairs on an H200).
    key = tl.sort(expert * BLOCK + tl.arange(0, BLOCK))  # [BLOCK]
    expert, pair = key // BLOCK, block * BLOCK + key % BLOCK
    shift = first_row + before - (tl.cumsum(own, 0) - own)  # [IDS]
    row = tl.gather(shift, expert, 0) + tl.arange(0, BLOCK)  # [BLOCK]
    here = expert < EXPERTS
    tl.store(parts.pair_of_row + row, pair, mask=here)
    tl.store(parts.row_of_pair + pair, tl.where(here, row, -1), mask=pair < pairs)

    tiles_of = tl.where(number < EXPERTS, (total + BLOCK_M - 1) // BLOCK_M, 0)  # [IDS]
    first_tile = tl.cumsum(tiles_of, 0) - tiles_of
    if block == 0:
        tl.store(parts.offsets + number, first_row, mask=number <= EXPERTS)
        tl.store(parts.tile_count, tl.sum(tiles_of, 0))
        tl.store(parts.counters, 0)
        tl.store(parts.counters + 1, 0)
    for nth in range(block, tl.max(tiles_of, 0), tl.num_programs(0)):
        tl.store(parts.tile_expert + first_tile + nth, number, mask=nth < tiles_of)
        tl.store(parts.tile_row + first_tile + nth, first_row + nth * BLOCK_M, mask=nth < tiles_of)


def why_no_tables(problem: MoEProblem) -> str | None:
    """Why the rows of a problem cannot be sorted here, in words; None where they can."""
    if problem.experts > MAX_EXPERTS:
        return f"experts is {problem.experts}; it sorts by at most {MAX_EXPERTS}"
    if problem.pairs() > MAX_PAIRS:
        return f"tokens times top_k is {problem.pairs()}; it sorts at most {MAX_PAIRS}"
    return None


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Sizes of the tables of a call, and of the launches that write them. ``tiles`` is an upper bound."""

    pairs: int
    experts: int
    block_m: int

    @classmethod
    def of(cls, problem: MoEProblem, block_m: int) -> RowCounts:
        return cls(problem.pairs(), problem.experts, block_m)

    @property
    def tiles(self) -> int:
        # Each of n experts with rows has at most one tile that is not full.
        return min(self.pairs, self.pairs // self.block_m + min(self.experts, self.pairs))

    @property
    def block(self) -> int:
        """Pairs of one program. Larger blocks sort longer, smaller ones read more counts of others."""
        if self.pairs <= ONE_BLOCK:
            return max(16, next_power_of_2(self.pairs))
        return 512 if self.pairs <= 32768 else 1024

    @property
    def blocks(self) -> int:
        return cdiv(self.pairs, self.block)

    @property
    def bins(self) -> int:
        """Bins of a histogram of ids: one an expert and one for ids of none, up to a power of two."""
        return max(16, next_power_of_2(self.experts + 1))

    @property
    def counted(self) -> bool:
        """Whether a launch of its own counts the pairs of each block."""
        return self.blocks > MAX_UNCOUNTED_BLOCKS

    @property
    def length(self) -> int:
        """Elements of ``tables``."""
        counts = self.blocks * self.bins if self.counted else 0
        return 2 * self.pairs + self.experts + 4 + 2 * self.tiles + counts


def bind_rows(like: torch.Tensor, rows: RowCounts, early_start: bool) -> KernelLaunch:
    """launch(ids, tables): fills ``tables``, int32 [rows.length], from contiguous int32 or int64 ids like these."""
    pairs, tiles, blocks, grid = rows.pairs, rows.tiles, rows.blocks, (rows.blocks, 1, 1)
    step = max(1, min(_COUNTED_AT_ONCE, 8192 // rows.bins))
    of_rows = (rows.experts, rows.bins, rows.block, rows.block_m, step, rows.counted, early_start)
    launch_rows = _build(flashmoe_moe_rows, like, 3, of_rows).bound(grid, pairs, tiles, blocks, *of_rows)
    if not rows.counted:
        return launch_rows
    of_count = (rows.experts, rows.bins, rows.block, early_start)
    launch_count = _build(flashmoe_moe_count, like, 2, of_count).bound(grid, pairs, tiles, *of_count)

    def launch(ids: Any, tables: Any) -> None:
        launch_count(ids, tables)
        launch_rows(ids, tables)

    return launch


def _build(function: triton.JITFunction, ids: torch.Tensor, integers: int, constexprs: tuple[object, ...]) -> Build:
    key = (ids.dtype, ids.data_ptr() % 16, ids.device, constexprs)
    arguments = (stand_in(ids), Pointer(torch.int32), *[2] * integers, *constexprs)
    return kept_build(key, function, arguments, num_warps=_WARPS, launch_pdl=bool(constexprs[-1]))


def launches(rows: RowCounts) -> tuple[Launch, ...]:
    """The launches of ``bind_rows``."""
    functions = (flashmoe_moe_count, flashmoe_moe_rows) if rows.counted else (flashmoe_moe_rows,)
    return tuple(Launch(f"^{one.__name__}$", (rows.blocks, 1, 1), 32 * _WARPS) for one in functions)
