"""The report in its three forms: an HTML page that needs no network and no script, Markdown to paste, CSV to load."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jinja2

from flashmoe_science.judge.gate.claims import Claim
from flashmoe_science.judge.report.blocks import Block, Cell, Definitions, Fold, Heading, Page, Paragraph, Table
from flashmoe_science.judge.report.charts import COLOURS
from flashmoe_science.judge.report.page import Contents, page_of
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.judge.stats import MARGIN, MIN_PAIRS
from flashmoe_science.judge.summary import JUDGEMENTS
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.store import write_whole


def write_report(runs: Sequence[JudgedRun], out: Path | str, *, claims: Sequence[Claim] = ()) -> list[Path]:
    """Write report.html, .md and .csv into a folder, which is made where it is absent. Returns their paths. Raises OSError."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    contents = Contents(runs, claims)
    page = page_of(contents)
    texts = {"report.html": as_html(page), "report.md": as_markdown(page), "report.csv": as_csv(contents.verdicts)}
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def as_html(page: Page) -> str:
    """The page as HTML. Every value is escaped; the same page gives the same bytes."""
    loader = jinja2.PackageLoader("flashmoe_science", "judge/report")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["fixed"] = lambda value, digits: f"{value:.{digits}f}"
    environment.filters["kind"] = lambda block: type(block).__name__
    tables = [block for section in page.sections for block in _unfolded(section.blocks) if isinstance(block, Table)]
    kinds = {one.kind: [column.heading for column in one.columns] for one in tables}
    constants = {"kinds": kinds, "states": JUDGEMENTS, "palette": COLOURS, "margin": MARGIN, "least_pairs": MIN_PAIRS}
    return environment.get_template("report.html.jinja").render(page=page, **constants)


def _unfolded(blocks: Iterable[Block]) -> Iterator[Block]:
    for block in blocks:
        yield from _unfolded(block.blocks) if isinstance(block, Fold) else (block,)


def as_markdown(page: Page) -> str:
    """The page as Markdown, without its charts and without blocks that are ``page_only``."""
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
        case Fold(page_only=False):
            if lines := [line for inner in block.blocks for line in _markdown(inner)]:
                yield from (f"### {_inline(block.title)}", "", *lines)
        case Table():
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


def markdown_cell(text: str) -> str:
    """Text escaped so that it neither ends a Markdown cell nor is read as HTML, code, a link or a picture."""
    escaped = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("`", "\\`")
    return escaped.replace("](", "]\\(").replace("&", "&amp;").replace("<", "&lt;")


def as_csv(verdicts: Sequence[Verdict]) -> str:
    """Every verdict, every field."""
    names = [field.name for field in dataclasses.fields(Verdict) if field.name != "interval"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: sheet_cell(value) for name, value in row.as_dict().items()} for row in verdicts)
    return text.getvalue()


def sheet_cell(value: object) -> object:
    """A value for a spreadsheet: a text that would be run as a formula is marked as text."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
