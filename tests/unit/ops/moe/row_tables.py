"""The tables of a mixture's rows (run with TRITON_INTERPRET=1). Prints one JSON object: by case, what is wrong with them."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashmoe_science.ops.moe.rows import RowCounts, bind_rows, tables_of, tile_at


@dataclass(frozen=True, slots=True)
class InSmallBlocks(RowCounts):
    """The interpreter sorts a block of 512 pairs in a second, one of 32 in a twentieth."""

    @property
    def block(self) -> int:
        return 32


SIZES = ((1, 16, 16), (5, 1, 16), (10, 4, 16), (60, 300, 32), (100, 60, 64))  # pairs, experts, block_m
# Of two, four and six programs.
LARGE = (RowCounts(700, 8, 16), InSmallBlocks(128, 9, 16), InSmallBlocks(170, 3, 16), InSmallBlocks(190, 40, 16))

COLUMNS, GROUP = 3, 4  # of tiles, as a program meets them


@triton.jit
def all_tiles(
    tables, found, pairs, tiles,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The tile of a program's own index, [programs, 4]."""
    index = tl.program_id(0)
    tile = tile_at(index, tables_of(tables, pairs, EXPERTS, tiles), tiles, COLUMNS, GROUP, BLOCK_M)
    tl.store(found + 4 * index, tile.expert)
    tl.store(found + 4 * index + 1, tile.row)
    tl.store(found + 4 * index + 2, tile.end)
    tl.store(found + 4 * index + 3, tile.column)


def in_order(counts: list[int], sizes: RowCounts) -> list[tuple[int, int, int, int]]:
    """The tiles that tile_at must give, one after the other."""
    found, first = [], 0
    for expert, rows in enumerate(counts):
        count = -(-rows // sizes.block_m)
        groups = -(-count // GROUP)
        size = -(-count // max(groups, 1))
        for start in range(0, count, max(size, 1)):
            members = range(start, min(start + size, count))
            found += [(expert, first + n * sizes.block_m, first + rows, c) for c in range(COLUMNS) for n in members]
        first += rows
    return found


def wrong(ids: torch.Tensor, sizes: RowCounts) -> list[str]:
    """Every table against what a stable sort gives. Pairs whose id is no expert's have no row."""
    pairs, experts, block_m = sizes.pairs, sizes.experts, sizes.block_m
    tables = torch.full((sizes.length,), -77, dtype=torch.int32)
    bind_rows(ids, sizes, early_start=False)(ids, tables)
    here = (ids >= 0) & (ids < experts)
    rows = int(here.sum())
    order = torch.where(here, ids, experts).sort(stable=True).indices[:rows]
    row_of_pair = torch.full((pairs,), -1)
    row_of_pair[order] = torch.arange(rows)
    counts = torch.bincount(ids[here], minlength=experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    tiles = [(e, int(offsets[e]) + n * block_m) for e in range(experts) for n in range(-(-int(counts[e]) // block_m))]
    pair_of_row, found_rows, found_offsets, expert_of, first_of, count, counters, _ = tables.long().split(
        [pairs, pairs, experts + 1, sizes.tiles, sizes.tiles, 1, 2, sizes.length - 2 * pairs - experts - 4 - 2 * sizes.tiles]
    )
    met = torch.full((COLUMNS * len(tiles) + 5, 4), -77, dtype=torch.int32)
    all_tiles[(len(met),)](tables, met, pairs, sizes.tiles, experts, COLUMNS, GROUP, block_m)
    checks = {
        "pair_of_row": torch.equal(pair_of_row[:rows], order),
        "row_of_pair": torch.equal(found_rows, row_of_pair),
        "offsets": torch.equal(found_offsets, offsets),
        "the number of tiles": int(count) == len(tiles) <= sizes.tiles,
        "tiles": list(zip(expert_of.tolist(), first_of.tolist(), strict=True))[: len(tiles)] == tiles,
        "counters": counters.tolist() == [0, 0],
        "tiles in order": list(map(tuple, met[:-5].tolist())) == in_order(counts.tolist(), sizes),
        "no tile past the last": met[-5:, 3].tolist() == [-1] * 5,
    }
    return [name for name, passes in checks.items() if not passes]


def main() -> None:
    torch.manual_seed(0)
    found = {}
    for pairs, experts, block_m in SIZES:
        drawn = torch.randint(-1, experts + 1, (pairs,))
        for name, ids in (("random", drawn), ("int32", drawn.int()), ("one expert", torch.zeros_like(drawn))):
            found[f"{pairs} pairs, {experts} experts, {name}"] = wrong(ids, RowCounts(pairs, experts, block_m))
    for sizes in LARGE:
        ids = torch.randint(-1, sizes.experts + 1, (sizes.pairs,))
        found[f"{sizes.blocks} programs, {sizes.experts} experts"] = wrong(ids, sizes)
    found["none has an expert"] = wrong(torch.full((40,), -1), RowCounts(40, 8, 16))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
