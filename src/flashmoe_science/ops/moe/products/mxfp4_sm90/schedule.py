"""Stream-K: the K of all tiles is one line of steps, of which each program has an equal part, whatever the number of tiles.

A program takes its part from the end. So the tile that it shares with the next program, of which it has the beginning, comes
first: it leaves its sums in memory. The one that it shares with the programs before it comes last, and what they left is there
by then. It adds that in the order of programs: results do not depend on which is fast. A program waits only for those of
lower index, which are there when it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.gluon_bridge import as_gluon
from flashmoe_science.ops.moe.rows import tables_of, tile_at

_tables_of = as_gluon(tables_of)
_tile_at = as_gluon(tile_at)


class Part(NamedTuple):
    """The steps of a program: from ``first`` of the tile with index ``begin`` to before ``stop`` of the tile ``end``."""

    begin: Any
    first: Any
    end: Any
    stop: Any
    before: Any  # programs that have a part of tile ``begin`` too, each of lower index


class Segment(NamedTuple):
    """The part of a tile that a program has: its steps from ``first`` to before ``stop``. A column of -1: there is none."""

    column: Any
    row: Any
    end: Any
    expert: Any
    first: Any
    stop: Any
    before: Any


@gluon.jit
def part_of(program, programs, units, STEPS: gl.constexpr):
    """The ``Part`` of a program of ``units`` tiles; without a step its end is before its begin. The first programs have a step
    more than the others where those cannot be equal."""
    share = units * STEPS // programs
    longer = units * STEPS % programs
    begin = program * share + gl.minimum(program, longer)
    end = begin + share + gl.where(program < longer, 1, 0)
    tile = begin // STEPS
    last = (end - 1) // STEPS
    head = tile * STEPS
    of_longer = longer * (share + 1)  # steps
    first_program = gl.where(
        head < of_longer, head // (share + 1), longer + (head - of_longer) // gl.maximum(share, 1)
    )
    return Part(tile, begin - head, gl.where(end > begin, last, tile - 1), end - last * STEPS, program - first_program)


@gluon.jit
def part_of_program(tables, pairs, tiles, EXPERTS: gl.constexpr, STEPS: gl.constexpr, COLUMNS: gl.constexpr):
    """The ``Part`` of this program. The tables were written two kernels before this one or earlier: those in between let the
    next one start when they have them."""
    units = gl.load(_tables_of(tables, pairs, EXPERTS, tiles).tile_count) * COLUMNS
    return part_of(gl.program_id(0), gl.num_programs(0), units, STEPS)


@gluon.jit
def segment_of(
    index, part, parts, tiles, STEPS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr
):  # fmt: skip
    """The ``Segment`` of a program in the tile of an index; its tiles' indices go down from the part's end."""
    tile = _tile_at(gl.maximum(index, 0), parts, tiles, COLUMNS, GROUP, TOKENS)
    here = index >= part.begin
    first = gl.where(index == part.begin, part.first, 0)
    stop = gl.where(index == part.end, part.stop, STEPS)
    before = gl.where(index == part.begin, part.before, 0)
    return Segment(gl.where(here, tile.column, -1), tile.row, tile.end, tile.expert, first, gl.where(here, stop, first), before)
