"""The one model of a report that its writers and the terminal share: sections of paragraphs, definitions, tables and charts.

A ``Fold`` holds what a page shows on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flashmoe_science.judge.report.charts import Chart


class Cell(NamedTuple):
    """``note`` is small print below the text. ``state`` is a verdict or an outcome, which colours the text."""

    text: str = ""
    note: str | None = None
    state: str | None = None


class Row(NamedTuple):
    """``origin`` is that of the kernel the row is about: "ours" and "candidate" are highlighted."""

    cells: tuple[Cell, ...]
    origin: str = ""


class Column(NamedTuple):
    """``style``: "n" for numbers, "mono" problems, "words" sentences, "k" kernels, "v" verdicts, "nw" text on one line."""

    heading: str
    style: str = ""


class Table(NamedTuple):
    """``kind`` is the same for tables of the same columns."""

    kind: str
    label: str
    columns: Sequence[Column]
    rows: Sequence[Row]


class Paragraph(NamedTuple):
    """``style`` is "", "big", "dim" or "code". ``state`` colours ``lead``, the first words."""

    text: str
    style: str = ""
    lead: str = ""
    state: str = ""


class Heading(NamedTuple):
    text: str
    note: str = ""


class Definitions(NamedTuple):
    """Terms, each with its text and a state that colours the term. ``page_only`` leaves them out of Markdown."""

    items: tuple[tuple[str, str, str], ...]
    page_only: bool = True


class Plots(NamedTuple):
    """``legend``: (kernel, colour, origin)."""

    charts: tuple[Chart, ...]
    legend: tuple[tuple[str, int, str], ...]


class Bar(NamedTuple):
    """A ratio drawn from 0, beside 1. ``state`` is its verdict."""

    label: str
    ratio: float
    note: str
    state: str


class Bars(NamedTuple):
    bars: tuple[Bar, ...]

    @property
    def most(self) -> float:
        """The ratio that a bar of full width has; longer bars are cut there."""
        return min(max(1.5, *(bar.ratio for bar in self.bars)), 3.0)


class Fold(NamedTuple):
    """``page_only`` leaves it out of Markdown."""

    title: str
    blocks: tuple[Block, ...]
    page_only: bool = False


Block = Table | Paragraph | Heading | Definitions | Plots | Bars | Fold


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
