"""Tables that fit: of a terminal's own width, of 100 columns where there is none (COLUMNS sets another).

A table of a report is printed with its rows in groups by their first column, which stands on a line above them. Where there is
no room for all the others, the names of kernels, which may be long, go onto a line above their row, and the last columns that
hold no verdict are left out. Notes are wrapped below their row.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from flashmoe_science.judge.report.blocks import Block, Column, Definitions, Heading, Paragraph, Table
from flashmoe_science.printable import printable

_PIPED_WIDTH = 100
_GAP, _INDENT, _BELOW = 2, 2, 6
_WIDEST = 80  # of a column: the name of one kernel must not push all the others out of sight
# What colours a verdict, an outcome or a status, by its first word.
COLOURS = {
    "faster": "green", "holds": "green", "gained": "green",
    "slower": "red", "fails": "red", "regressed": "red",
    "undecided": "yellow", "no": "yellow", "absent": "yellow", "supported": "yellow",
    "equivalent": "cyan", "new": "cyan", "untested": "cyan",
    "refused": "magenta", "ruled": "dim",
}  # fmt: skip


def console(piped_width: int = _PIPED_WIDTH) -> Console:
    """Standard output, in colour only on a terminal. ``piped_width`` is its width where COLUMNS gives none."""
    found = Console(highlight=False, emoji=False)
    if not found.is_terminal:
        columns = os.environ.get("COLUMNS", "")
        found.width = int(columns) if re.fullmatch("[1-9][0-9]{0,4}", columns) else piped_width
    return found


def print_table(out: Console, table: Table) -> None:
    """Print a table under its label. The rows of the kernels in question have them in bold."""
    columns = table.columns[1:]
    rows = [
        [cell.text if len(cell.text) <= _WIDEST else f"{cell.text[: _WIDEST - 3]}..." for cell in row.cells[1:]]
        for row in table.rows
    ]
    widths = [max(len(text) for text in (column.heading, *(row[i] for row in rows))) for i, column in enumerate(columns)]
    kept = _kept(columns, widths, out.width - _INDENT)

    def line(cells: Sequence[str], styles: Sequence[str]) -> None:
        text = Text(" " * _INDENT)
        for place, i in enumerate(kept):
            cell = cells[i].rjust(widths[i]) if columns[i].style == "n" else cells[i].ljust(widths[i])
            text.append(" " * (_GAP if place else 0)).append(cell, style=styles[i])
        _put(out, text)

    _put(out, Text(table.label, style="italic"))
    line([column.heading for column in columns], ["bold"] * len(columns))
    before = None
    for row, cells in zip(table.rows, rows, strict=True):
        if row.cells[0].text != before:
            before = row.cells[0].text
            put_wrapped(out, before)
        moved = [i for i, column in enumerate(columns) if column.style == "k" and i not in kept and cells[i]]
        if moved:
            put_wrapped(out, ", ".join(f"{columns[i].heading} {cells[i]}" if i else cells[i] for i in moved), _INDENT)
        bold = "bold" if row.origin in ("ours", "candidate") else ""
        line(cells, [COLOURS.get(cell.state or "", "") if i else bold for i, cell in enumerate(row.cells[1:])])
        if notes := "; ".join(cell.note for cell in row.cells if cell.note):
            put_wrapped(out, notes, _BELOW)


def print_block(out: Console, block: Block) -> None:
    """Print a block of a report; charts are a page's alone."""
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
            print_table(out, block)


def _kept(columns: Sequence[Column], widths: Sequence[int], room: int) -> list[int]:
    """The places of the columns that stand in the rows."""

    def too_wide(places: Sequence[int]) -> bool:
        return sum(widths[i] + _GAP for i in places) - _GAP > room

    kept = list(range(len(columns)))
    if too_wide(kept):
        kept = [i for i in kept if columns[i].style != "k"]
    for place in [i for i in reversed(kept[1:]) if columns[i].style != "v"]:
        if too_wide(kept):
            kept.remove(place)
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


def _put(out: Console, text: Text) -> None:
    text.rstrip()
    out.print(text, no_wrap=True, overflow="ignore", crop=False)
