"""Runs in, a report out: one HTML page that needs no network and no script, and the same as Markdown, CSV and JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from flashmoe_science.judge import formats
from flashmoe_science.judge.charts import shown_kernels
from flashmoe_science.judge.contents import Contents, contents_of
from flashmoe_science.judge.crosscheck import TOLERANCE, tools_that_agree
from flashmoe_science.judge.gate.claims import ClaimResult
from flashmoe_science.judge.report_text import as_csv, as_jsonl, as_markdown, claim_scope
from flashmoe_science.judge.roofline import Point, Roofline, rooflines
from flashmoe_science.judge.roofline_chart import RooflineChart, roofline_chart
from flashmoe_science.judge.stats import MARGIN, MIN_PAIRS
from flashmoe_science.judge.summary import SAID
from flashmoe_science.judge.views import control_view, group_view
from flashmoe_science.store import Run, write_whole

_TEMPLATE = "report.html.jinja"
_PALETTE = 8  # colours that the template has
_FILTERS = {
    "us": formats.microseconds,
    "sig": formats.significant,
    "fixed": formats.fixed,
    "ratio": formats.ratio,
    "percent": formats.percent,
    "signed": formats.signed,
    "times": formats.times,
    "duration": formats.duration,
    "usd": formats.usd,
    "claim_scope": claim_scope,
}


class ReportError(ValueError):
    """A report that cannot be written, said in one line."""


@dataclass(frozen=True, slots=True)
class RooflineView:
    """``points`` are all that were placed, ``shown`` the kernels that the chart draws, each with its colour."""

    title: str
    chart: RooflineChart | None
    points: tuple[Point, ...]
    shown: tuple[tuple[str, int], ...]


def write_report(
    runs: Sequence[Run], out_dir: Path | str, *, claims: Sequence[ClaimResult] = ()
) -> tuple[Path, Path, Path, Path]:
    """Write report.html, .md, .csv and .jsonl into a folder, which is made where it is absent. Returns their paths.

    Raises:
        ReportError: the folder cannot be made or written.
    """
    folder = Path(out_dir)
    contents = contents_of(runs, claims)
    texts = {
        "report.html": as_html(contents),
        "report.md": as_markdown(contents),
        "report.csv": as_csv(contents.judged),
        "report.jsonl": as_jsonl(contents),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(folder / name, text)
    except OSError as error:
        words = (error.strerror or str(error)).lower()
        raise ReportError(f"cannot write a report into {folder}: {words}; choose a folder that you can write to") from None
    html, markdown, sheet, lines = (folder / name for name in texts)
    return html, markdown, sheet, lines


def as_html(contents: Contents) -> str:
    """The page. Every value is escaped; the same runs give the same bytes."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flashmoe_science", "judge"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(_FILTERS)
    return environment.get_template(_TEMPLATE).render(_values(contents))


def _values(contents: Contents) -> Mapping[str, Any]:
    """What the template names."""
    shown = shown_kernels(contents.judged)[:_PALETTE]
    colours = {kernel: place for place, kernel in enumerate(shown)}
    return {
        "candidates": contents.candidates,
        "views": [group_view(group, colours) for group in contents.groups],
        "claims": contents.claims,
        "rooflines": [_roofline_view(one, colours) for one in rooflines(contents.records, contents.judged) if one.points],
        "diagnoses": contents.diagnoses,
        "plans": contents.plans,
        "outcomes": contents.outcomes,
        "controls": [control_view(group, contents.records) for group in contents.groups],
        "agreements": contents.agreements,
        "agreeing": tools_that_agree(contents.agreements),
        "refusals": contents.refusals,
        "cost": contents.cost,
        "runs": contents.runs,
        "superseded": contents.superseded,
        "ours": any(row.origin == "ours" for row in contents.judged),
        "latest": max((run.header.started for run in contents.records), default=None),
        "said": SAID,
        "palette": _PALETTE,
        "margin": MARGIN,
        "min_pairs": MIN_PAIRS,
        "tolerance": TOLERANCE,
    }


def _roofline_view(roofline: Roofline, colours: Mapping[str, int]) -> RooflineView:
    present = {point.kernel for point in roofline.points}
    return RooflineView(
        title=f"{roofline.machine}, {roofline.dtype}",
        chart=roofline_chart(roofline, colours),
        points=roofline.points,
        shown=tuple((kernel, place) for kernel, place in colours.items() if kernel in present),
    )
