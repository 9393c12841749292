"""Tables that fit: of a terminal's own width, of 100 columns where there is none (COLUMNS sets another).

A sheet's rows stand in groups. Where there is room a group's name is its first column; where there is not, it is a line above
its rows. Then the columns that lead a row (names, which may be long) go onto a line above it, and last columns are left out,
the least needed first. Sentences are wrapped below the row that they are about.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from flashmoe_science.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_WIDTH = 100
_GAP, _INDENT, _BELOW = 2, 2, 6
_WIDEST = 80  # of a column: the name of one kernel must not push all the others out of sight


@dataclass(frozen=True, slots=True)
class Column:
    """Where there is too little room, a column with ``leads`` moves to the line above its row, after these words; then one with
    ``spare`` is left out, the highest number first; 0 is never left out."""

    heading: str
    right: bool = False
    spare: int = 0
    leads: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """One row: its group's name, a text for each column, a style for some of them, and what is said below it."""

    group: str
    cells: tuple[str, ...]
    styles: tuple[str, ...] = ()
    below: str | None = None


def console(piped_width: int = _PIPED_WIDTH) -> Console:
    """Standard output, in colour only on a terminal. ``piped_width`` is its width where COLUMNS gives none."""
    from rich.console import Console

    found = Console(highlight=False, emoji=False)
    if not found.is_terminal:
        columns = os.environ.get("COLUMNS", "")
        found.width = int(columns) if re.fullmatch("[1-9][0-9]{0,4}", columns) else piped_width
    return found


def print_sheet(out: Console, title: str, group: str, columns: Sequence[Column], lines: Sequence[Line]) -> None:
    """Print the lines under a title; ``group`` is the heading of the groups' names."""
    rows = [[_cut(cell) for cell in line.cells] for line in lines]
    widths = [max(len(text) for text in (column.heading, *(row[i] for row in rows))) for i, column in enumerate(columns)]
    names = max(len(text) for text in (group, *(line.group for line in lines)))
    inline = names + _GAP + _total(widths, range(len(columns))) <= out.width
    kept = list(range(len(columns))) if inline else _kept(columns, widths, out.width - _INDENT)

    def row(lead: str, cells: Sequence[str], styles: Sequence[str] = ()) -> Text:
        text = Text(lead.ljust(names + _GAP if inline else _INDENT))
        for place, i in enumerate(kept):
            cell = cells[i].rjust(widths[i]) if columns[i].right else cells[i].ljust(widths[i])
            text.append(" " * (_GAP if place else 0)).append(cell, style=styles[i] if i < len(styles) else "")
        return text

    _put(out, Text(title, style="italic"))
    headings = row(group if inline else "", [column.heading for column in columns])
    headings.stylize("bold")
    _put(out, headings)
    before = None
    for line, cells in zip(lines, rows, strict=True):
        name = line.group if line.group != before else ""
        if name and not inline:
            put_wrapped(out, name)
        moved = [i for i, column in enumerate(columns) if column.leads is not None and i not in kept and cells[i]]
        if moved:
            put_wrapped(out, " ".join(f"{columns[i].leads}{cells[i]}" for i in moved), _INDENT)
        _put(out, row(name if inline else "", cells, line.styles))
        if line.below:
            put_wrapped(out, line.below, _BELOW)
        before = line.group


def _kept(columns: Sequence[Column], widths: Sequence[int], room: int) -> list[int]:
    """The columns that stand in the rows, where not all of them fit beside the groups' names."""
    kept = list(range(len(columns)))
    if _total(widths, kept) > room:
        kept = [i for i in kept if columns[i].leads is None]
    for index in sorted((i for i in kept if columns[i].spare), key=lambda i: -columns[i].spare):
        if _total(widths, kept) > room:
            kept.remove(index)
    return kept


def put_wrapped(out: Console, words: str, indent: int = 0, hanging: int = 0) -> None:
    """Print a sentence, wrapped at spaces to the width that there is, all but its first line ``hanging`` further in; what a
    terminal would obey is written out."""
    for part in textwrap.wrap(
        printable(words),
        max(20, out.width - indent),
        subsequent_indent=" " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]:
        _put(out, Text(" " * indent + part))


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _total(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[i] for i in kept) + _GAP * (len(kept) - 1)


def _put(out: Console, text: Text) -> None:
    text.rstrip()
    out.print(text, no_wrap=True, overflow="ignore", crop=False)
