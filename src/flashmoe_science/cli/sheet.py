"""Tables that fit: of a terminal's own width, of 100 columns where there is none (COLUMNS sets another).

A sheet's rows stand in groups. Where there is room a group's name is its first column; where there is not, it is a line above
its rows. Then columns are left out, the least needed first. Sentences are wrapped below the row that they are about.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """``spare``: the column is left out where there is no room for it, the highest number first; 0 is never left out."""

    heading: str
    right: bool = False
    spare: int = 0


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
    lines = [replace(line, cells=tuple(map(_cut, line.cells))) for line in lines]
    widths = [
        max(len(text) for text in (column.heading, *(line.cells[i] for line in lines))) for i, column in enumerate(columns)
    ]
    names = max(len(text) for text in (group, *(line.group for line in lines)))
    inline = names + _GAP + _total(widths, range(len(columns))) <= out.width
    kept = list(range(len(columns)))
    for index in sorted(kept, key=lambda index: -columns[index].spare):
        if inline or _INDENT + _total(widths, kept) <= out.width or not columns[index].spare:
            break
        kept.remove(index)
    _put(out, Text(title, style="italic"))
    lead = names + _GAP if inline else _INDENT
    headings = _row(
        [columns[i].heading for i in kept], [""] * len(kept), [widths[i] for i in kept], [columns[i].right for i in kept]
    )
    first = Text(group.ljust(lead) if inline else " " * lead)
    _put(out, _bold(first + headings))
    before = None
    for line in lines:
        name = line.group if line.group != before else ""
        if name and not inline:
            put_wrapped(out, name)
        styles = [line.styles[i] if i < len(line.styles) else "" for i in kept]
        cells = _row([line.cells[i] for i in kept], styles, [widths[i] for i in kept], [columns[i].right for i in kept])
        _put(out, Text(name.ljust(lead) if inline else " " * lead) + cells)
        if line.below:
            put_wrapped(out, line.below, _BELOW)
        before = line.group


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


def _row(cells: Sequence[str], styles: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> Text:
    row = Text()
    for index, (cell, style, width, to_right) in enumerate(zip(cells, styles, widths, right, strict=True)):
        row.append(" " * (_GAP if index else 0))
        row.append(cell.rjust(width) if to_right else cell.ljust(width), style=style)
    return row


def _bold(text: Text) -> Text:
    text.stylize("bold")
    return text


def _put(out: Console, text: Text) -> None:
    text.rstrip()
    out.print(text, no_wrap=True, overflow="ignore", crop=False)
