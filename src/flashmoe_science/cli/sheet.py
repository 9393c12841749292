"""Tables and sentences as wide as the terminal, or 100 columns without one (COLUMNS sets another width), drawn by rich.

The rows of a table are grouped by their first column. Where a row is too wide, the names of kernels, which may be long, go
onto a line above it. Notes are wrapped below their row.
"""

from __future__ import annotations

import os
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from flashmoe_science.judge.report.blocks import Block, Definitions, Fold, Heading, Paragraph, Row, Table
from flashmoe_science.printable import printable

_PIPED_WIDTH = 100
_MAX_ROWS = 24  # that are printed without --rows
Rows = Annotated[bool, typer.Option("--rows", help="Print every row, however many there are.")]
_INDENT, _BELOW, _GAP = 2, 6, 2
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
    if not (found.is_terminal or os.environ.get("COLUMNS", "").strip("0").isdigit()):  # which rich reads
        found.width = piped_width
    return found


def fits_a_screen(rows: int) -> bool:
    """Whether ``rows`` rows are few enough to be printed without --rows."""
    return rows <= _MAX_ROWS


def print_table(out: Console, table: Table) -> None:
    """Print a table under its label. The rows of the kernels in question have them in bold."""
    columns = table.columns[1:]
    widths = [max(map(len, (one.heading, *(row.cells[i].text for row in table.rows)))) for i, one in enumerate(columns, 1)]
    too_wide = _INDENT + sum(widths) + _GAP * len(widths) > out.width
    kept = [i for i, one in enumerate(columns) if not (too_wide and one.style == "k")]

    def put(texts: list[Text]) -> None:
        """Print one row as a grid. All grids have the same widths, so that rich divides the console alike; no number wraps."""
        grid = Grid.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
        for i in kept:
            if columns[i].style == "n":
                grid.add_column(min_width=widths[i], justify="right", no_wrap=True, overflow="ellipsis")
            else:
                texts[i].align("left", widths[i])
                grid.add_column(overflow="fold")
        grid.add_row(*(texts[i] for i in kept))
        out.print(Padding.indent(grid, _INDENT))

    def put_row(row: Row) -> None:
        cells = row.cells[1:]
        moved = [i for i in range(len(columns)) if i not in kept and cells[i].text]
        if moved:
            print_wrapped(
                out, ", ".join(f"{columns[i].heading} {cells[i].text}" if i else cells[i].text for i in moved), _INDENT
            )
        bold = "bold" if row.origin in ("ours", "candidate") else ""
        put([Text(cell.text, style=COLOURS.get(cell.state or "", "") if i else bold) for i, cell in enumerate(cells)])
        if notes := "; ".join(cell.note for cell in row.cells if cell.note):
            print_wrapped(out, notes, _BELOW)

    out.print(Text(table.label, style="italic"))
    put([Text(column.heading, style="bold") for column in columns])
    for group, rows in groupby(table.rows, key=lambda row: row.cells[0].text):
        print_wrapped(out, group)
        for row in rows:
            put_row(row)


def print_block(out: Console, block: Block) -> None:
    """Print a block of a report; charts are on pages only."""
    match block:
        case Heading():
            print_wrapped(out, f"{block.text} {block.note}".rstrip())
        case Paragraph():
            print_wrapped(out, f"{block.lead} {block.text}".lstrip())
        case Definitions():
            for term, text, state in block.items:
                lead = f"{'ruled out' if state == 'ruled' else state:9}" if state else ""
                print_wrapped(out, f"{term}: {text}", lead=f"{lead}  ", style=COLOURS.get(state, ""))
        case Table():
            print_table(out, block)
        case Fold():
            for inner in block.blocks:
                print_block(out, inner)


def print_wrapped(out: Console, words: str, indent: int = 0, lead: str = "", style: str = "") -> None:
    """Print a sentence, wrapped at spaces to the console's width, to the right of ``lead``, which has a style; control
    characters are written out."""
    grid = Grid.grid()
    if lead:
        grid.add_column(width=len(lead))
    grid.add_column(overflow="fold")
    grid.add_row(*([Text(lead, style=style)] if lead else []), Text(printable(words)))
    out.print(Padding.indent(grid, indent))
