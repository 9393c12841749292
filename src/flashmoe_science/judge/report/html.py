"""The report as one HTML page that needs no network and no script, and all three of its forms written into a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from flashmoe_science.judge.gate.claim import Claim
from flashmoe_science.judge.report.blocks import Page, Table
from flashmoe_science.judge.report.charts import COLOURS
from flashmoe_science.judge.report.contents import Contents
from flashmoe_science.judge.report.sections import page_of
from flashmoe_science.judge.report.text import as_csv, as_markdown
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.judge.summary import SAID
from flashmoe_science.store import Run, write_whole


def write_report(runs: Sequence[Run | JudgedRun], out: Path | str, *, claims: Sequence[Claim] = ()) -> tuple[Path, Path, Path]:
    """Write report.html, .md and .csv into a folder, which is made where it is absent. Returns their paths. Raises OSError."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    contents = Contents(runs, claims)
    page = page_of(contents)
    texts = {"report.html": as_html(page), "report.md": as_markdown(page), "report.csv": as_csv(contents.verdicts)}
    for name, text in texts.items():
        write_whole(folder / name, text)
    html, markdown, sheet = (folder / name for name in texts)
    return html, markdown, sheet


def as_html(page: Page) -> str:
    """The page as HTML. Every value is escaped; the same page gives the same bytes."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flashmoe_science", "judge/report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["fixed"] = lambda value, digits: f"{value:.{digits}f}"
    tables = [block for section in page.sections for block in section.blocks if isinstance(block, Table)]
    kinds = {one.kind: [column.heading for column in one.columns] for one in tables}
    return environment.get_template("report.html.jinja").render(page=page, kinds=kinds, states=SAID, palette=COLOURS)
