"""The report as text: Markdown to paste, CSV to load."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Iterator, Sequence

from flashmoe_science.judge.formats import markdown_cell, sheet_cell
from flashmoe_science.judge.report.blocks import Block, Cell, Definitions, Heading, Page, Paragraph, Table
from flashmoe_science.judge.verdicts import Verdict


def as_markdown(page: Page) -> str:
    """The page without its charts and without what it shows on request only."""
    lines = [f"# {_inline(page.title)}", "", page.lead, ""]
    for section in page.sections:
        written = [line for block in section.blocks for line in _markdown(block)]
        if written:
            lines += [f"## {_inline(section.title)}", "", *written]
    return "\n".join(lines).rstrip("\n") + "\n"


def _markdown(block: Block) -> Iterator[str]:
    match block:
        case Heading():
            yield from (f"### {_inline(' '.join(filter(None, (block.text, block.note))))}", "")
        case Paragraph(style="code"):
            yield from (f"    {' '.join(block.text.split())}", "")
        case Paragraph():
            lead = f"**{_inline(block.lead)}** " if block.lead else ""
            yield from (f"{lead}{_inline(block.text)}", "")
        case Definitions(page_only=False):
            yield from (*(f"- {_inline(term)}: {_inline(text)}" for term, text, _ in block.items), "")
        case Table(page_only=False):
            yield _row(column.heading for column in block.columns)
            yield f"|{'|'.join('---:' if column.style == 'n' else '---' for column in block.columns)}|"
            yield from (_row(_text_of(cell) for cell in row.cells) for row in block.rows)
            yield ""


def _text_of(cell: Cell) -> str:
    return ": ".join(filter(None, (cell.text, cell.note))) if cell.state else cell.text


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(markdown_cell, cells))} |"


def _inline(text: str) -> str:
    return markdown_cell(text).replace("*", "\\*").replace("_", "\\_")


def as_csv(verdicts: Sequence[Verdict]) -> str:
    """Every verdict, every field."""
    names = [field.name for field in dataclasses.fields(Verdict) if field.name != "interval"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: sheet_cell(value) for name, value in row.as_dict().items()} for row in verdicts)
    return text.getvalue()
