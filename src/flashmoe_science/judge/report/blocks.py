"""The one model of a report that its writers share: sections of paragraphs, definitions, tables and charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from flashmoe_science.judge.report.charts import Chart


class Cell(NamedTuple):
    """``note`` is small print below the text. ``state`` is a verdict or an outcome, which colours the text."""

    text: str = ""
    note: str | None = None
    state: str | None = None


class Row(NamedTuple):
    """``origin`` is that of the kernel the row is about: "ours" and "candidate" stand out."""

    cells: tuple[Cell, ...]
    origin: str = ""


class Column(NamedTuple):
    """``style``: "n" for numbers, "mono" problems, "words" sentences, "k" kernels, "v" verdicts, "nw" what is not broken."""

    heading: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """``kind`` is the same for tables of the same columns. With ``fold``, a page shows those words and the table on request;
    ``page_only`` leaves it out of Markdown."""

    block: ClassVar[str] = "table"
    kind: str
    label: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    fold: str | None = None
    page_only: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError: a row that has not a cell a column."""
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"a row of table {self.kind!r} has {len(row.cells)} cells; it must have {len(self.columns)}")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """``style`` is "", "big", "dim" or "code". ``state`` colours ``lead``, the first words."""

    block: ClassVar[str] = "paragraph"
    text: str
    style: str = ""
    lead: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True)
class Heading:
    block: ClassVar[str] = "heading"
    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Definitions:
    """Terms, each with its text and a state that colours the term."""

    block: ClassVar[str] = "definitions"
    items: tuple[tuple[str, str, str], ...]
    fold: str | None = None
    page_only: bool = True


@dataclass(frozen=True, slots=True)
class Plots:
    """``legend``: (kernel, colour, origin)."""

    block: ClassVar[str] = "plots"
    charts: tuple[Chart, ...]
    legend: tuple[tuple[str, int, str], ...]


Block = Table | Paragraph | Heading | Definitions | Plots


class Section(NamedTuple):
    anchor: str
    title: str
    blocks: tuple[Block, ...]


class Page(NamedTuple):
    title: str
    lead: str
    sections: tuple[Section, ...]


def columns(*headings: str) -> tuple[Column, ...]:
    """Columns from "style:heading", the style left out where there is none."""
    parts = [heading.rpartition(":") for heading in headings]
    return tuple(Column(heading, style) for style, _, heading in parts)
