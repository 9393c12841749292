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

    from flashmoe_science.judge.report.blocks import Block

_PIPED_WIDTH = 100
_GAP, _INDENT, _BELOW = 2, 2, 6
_WIDEST = 80  # of a column: the name of one kernel must not push all the others out of sight
# What colours a verdict, an outcome or a status, by its first word.
COLOURS = {
    "faster": "green", "holds": "green", "gained": "green", "hit": "green",
    "slower": "red", "fails": "red", "regressed": "red", "missed": "red",
    "undecided": "yellow", "no": "yellow", "absent": "yellow", "supported": "yellow",
    "equivalent": "cyan", "new": "cyan", "untested": "cyan", "not": "cyan",
    "refused": "magenta", "exceeded": "magenta", "ruled": "dim",
}  # fmt: skip


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


def print_block(out: Console, block: Block) -> None:
    """A block of a report, without what only a page can show. A table's first column names its groups; of the others the last
    are left out first where there is little room, and a row's notes stand below it."""
    from flashmoe_science.judge.report.blocks import Definitions, Heading, Paragraph, Table

    match block:
        case Heading():
            put_wrapped(out, f"{block.text} {block.note}".rstrip())
        case Paragraph():
            put_wrapped(out, f"{block.lead} {block.text}".lstrip())
        case Definitions():
            for term, text, state in block.items:
                lead = f"{'ruled out' if state == 'ruled' else state:9}  " if state else "  "
                put_wrapped(out, f"{lead}{term}: {text}", hanging=len(lead), styled=len(lead), style=COLOURS.get(state, ""))
        case Table():
            shown = [Column(one.heading, one.style == "n", spare) for spare, one in enumerate(block.columns[1:])]
            lines = []
            for row in block.rows:
                first, *cells = row.cells
                notes = "; ".join(cell.note for cell in row.cells if cell.note)
                styles = tuple(COLOURS.get(cell.state or "", "") for cell in cells)
                lines.append(Line(first.text, tuple(cell.text for cell in cells), styles, notes or None))
            print_sheet(out, block.label, block.columns[0].heading, shown, lines)


def _kept(columns: Sequence[Column], widths: Sequence[int], room: int) -> list[int]:
    """The columns that stand in the rows, where not all of them fit beside the groups' names."""
    kept = list(range(len(columns)))
    if _total(widths, kept) > room:
        kept = [i for i in kept if columns[i].leads is None]
    for index in sorted((i for i in kept if columns[i].spare), key=lambda i: -columns[i].spare):
        if _total(widths, kept) > room:
            kept.remove(index)
    return kept


def put_wrapped(out: Console, words: str, indent: int = 0, hanging: int = 0, styled: int = 0, style: str = "") -> None:
    """Print a sentence, wrapped at spaces to the width that there is, all but its first line ``hanging`` further in, its first
    ``styled`` letters in a style; what a terminal would obey is written out."""
    room = max(20, out.width - indent)
    wrapped = textwrap.TextWrapper(room, subsequent_indent=" " * hanging, break_long_words=False, break_on_hyphens=False)
    for number, part in enumerate(wrapped.wrap(printable(words)) or [""]):
        text = Text(" " * indent + part)
        if not number:
            text.stylize(style, indent, indent + styled)
        _put(out, text)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _total(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[i] for i in kept) + _GAP * (len(kept) - 1)


def _put(out: Console, text: Text) -> None:
    text.rstrip()
    out.print(text, no_wrap=True, overflow="ignore", crop=False)
