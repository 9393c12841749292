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
from flashmoe_science.ops.moe.rows import tile_at

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
    """The ``Part`` of a program of ``units`` tiles; without a step its end is before its begin."""
    total = units.to(gl.int64) * STEPS
    working = gl.minimum(total, programs.to(gl.int64))
    busy = program < working
    working = gl.maximum(working, 1)
    begin = total * program // working
    end = gl.where(busy, total * (program + 1) // working, begin)
    tile = begin // STEPS
    first_program = ((tile * STEPS + 1) * working - 1) // gl.maximum(total, 1)  # whose part has the tile's first step
    last = (end - 1) // STEPS
    return Part(
        tile.to(gl.int32),
        (begin - tile * STEPS).to(gl.int32),
        gl.where(end > begin, last, tile - 1).to(gl.int32),
        (end - last * STEPS).to(gl.int32),
        (program - first_program).to(gl.int32),
    )


@gluon.jit
def segment_of(index, part, parts, tiles, STEPS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr):
    """The ``Segment`` of a program in the tile of an index; its tiles' indices go down from the part's end."""
    tile = _tile_at(gl.maximum(index, 0), parts, tiles, COLUMNS, GROUP, TOKENS)
    here = index >= part.begin
    return Segment(
        gl.where(here, tile.column, -1),
        tile.row,
        tile.end,
        tile.expert,
        gl.where(index == part.begin, part.first, 0),
        gl.where(index == part.end, part.stop, STEPS),
        gl.where(index == part.begin, part.before, 0),
    )
