"""The tile scheduler of grouped products: tiles in waves of one a program; what is left over, less than a wave, by stream-K.

The K of the tiles left over is one line of units of one or two steps, of which each program has an equal part. The tile that it
shares with the next program, of which it has the beginning, comes before its whole tiles: it leaves its sums in memory. The one
that it shares with the programs before it comes last, and what they left is there by then. It adds that in the order of
programs: results do not depend on which is fast. A program waits only for those of lower index, which are there when it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.ops.gluon_bridge import as_gluon, barrier
from flashmoe_science.ops.moe.rows import tile_at

_tile_at = as_gluon(tile_at)


class Part(NamedTuple):
    """The tiles of a program: of the first ``shared`` ones the units of steps from ``first`` of the tile ``begin`` to
    before ``stop`` of the tile ``end``; of each wave one."""

    begin: Any
    first: Any
    end: Any
    stop: Any
    before: Any  # programs that have a part of tile ``begin`` too, each of lower index
    shared: Any
    waves: Any


class Segment(NamedTuple):
    """The part of a tile that a program has: its units from ``first`` to before ``stop``. A column of -1: there is none."""

    column: Any
    row: Any
    end: Any
    expert: Any
    first: Any
    stop: Any
    program: Any  # the first that has a part of a tile that this one ends; otherwise this one


@gluon.jit
def part_of(program, programs, tiles, UNITS: gl.constexpr):
    """The ``Part`` of a program of so many tiles; its end is before its begin if it shares none. The first programs have a unit
    more than the others where those cannot be equal."""
    shared = tiles % programs
    share = shared * UNITS // programs
    longer = shared * UNITS % programs
    begin = program * share + gl.minimum(program, longer)
    end = begin + share + gl.where(program < longer, 1, 0)
    tile = begin // UNITS
    last = (end - 1) // UNITS
    head = tile * UNITS
    of_longer = longer * (share + 1)  # units
    first_program = gl.where(head < of_longer, head // (share + 1), longer + (head - of_longer) // gl.maximum(share, 1))
    last = gl.where(end > begin, last, tile - 1)
    return Part(tile, begin - head, last, end - last * UNITS, program - first_program, shared, tiles // programs)


@gluon.jit
def part_of_program(parts, UNITS: gl.constexpr, COLUMNS: gl.constexpr):
    """The ``Part`` of this program. The tables were written two kernels before this one or earlier: those in between let the
    next one start when they have them."""
    count = gl.load(parts.tile_count) * COLUMNS
    return part_of(gl.program_id(0), gl.num_programs(0), count, UNITS)


@gluon.jit
def first_of(part):
    """The number of a program's first segment, for ``segment_of``."""
    return gl.where(part.end > part.begin, 0, 1)


@gluon.jit
def segment_of(
    nth, part, parts, tiles, UNITS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr
):  # fmt: skip
    """The ``nth`` segment of a program: 0 of the shared tile that it begins, then whole tiles, last the one that it ends."""
    after = nth - part.waves
    whole = part.shared + (nth - 1) * gl.num_programs(0) + gl.program_id(0)
    index = gl.where(after > 0, part.begin, gl.where(nth == 0, part.end, whole))
    tile = _tile_at(gl.maximum(index, 0), parts, tiles, COLUMNS, GROUP, TOKENS)
    none = (after > 1) | ((after == 1) & (part.end < part.begin))
    first = gl.where(after == 1, part.first, 0)
    stop = gl.where(index == part.end, part.stop, UNITS)
    program = gl.program_id(0) - gl.where((after == 1) & (stop == UNITS), part.before, 0)
    column, stop = gl.where(none, -1, tile.column), gl.where(none, first, stop)
    return Segment(column, tile.row, tile.end, tile.expert, first, stop, program)


@gluon.jit
def _partial_at(partial, acc, program, NTH: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr):
    """Pointers to what a program leaves of the ``NTH`` part of a tile's sums, of parts of up to ``COLUMNS`` columns."""
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, layout)), 0)
    return partial + (program * PARTS + NTH) * (ROWS * COLUMNS) + row * WIDTH + column


@gluon.jit
def leave(acc, partial, flags, program, NTH: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr):
    """Write this program's sums of the ``NTH`` of a tile's ``PARTS``, whose end another program has, then the flag that says
    so."""
    gl.store(_partial_at(partial, acc, program, NTH, PARTS, COLUMNS), acc)
    barrier()
    gl.atomic_add(flags + program * PARTS + NTH, 1, sem="release")


@gluon.jit
def collect(acc, partial, flags, first, NTH: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr):
    """The sums of a whole tile, of which programs from ``first`` to before this one have left theirs: this one's, then those in
    order."""
    for program in range(first, gl.program_id(0)):
        flag = flags + program * PARTS + NTH
        written = gl.atomic_add(flag, 0, sem="acquire")
        while written == 0:
            written = gl.atomic_add(flag, 0, sem="acquire")
        acc += gl.load(_partial_at(partial, acc, program, NTH, PARTS, COLUMNS))
    return acc
