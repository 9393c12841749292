"""Runs in, a report out: one HTML page that needs no network and no script, Markdown to paste, CSV to load."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import jinja2

from flashmoe_science.judge.charts import RatioChart, SpeedChart, ratio_chart, shown_kernels, speed_charts
from flashmoe_science.judge.claims import ClaimResult
from flashmoe_science.judge.stats import MARGIN, MIN_PAIRS
from flashmoe_science.judge.summary import SAID, Group, groups
from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.judge.verdict import Verdict
from flashmoe_science.judge.verdicts import superseded, verdicts
from flashmoe_science.records import EndRow, NoteRow, RefusalRow
from flashmoe_science.store import Run, write_whole

_TEMPLATE = "report.html.jinja"
_PALETTE = 8  # colours that the template has


class ReportError(ValueError):
    """A report that cannot be written, said in one line."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run as the report shows it: where, when, with what, at what cost, what it refused, and how to do it again."""

    run: Run
    gpu: str
    command: str
    standing: bool  # whether a verdict that stands rests on it
    end: EndRow | None
    refusals: tuple[RefusalRow, ...]
    notes: tuple[tuple[str, int], ...]  # distinct texts with the number of problems that they were made on


@dataclass(frozen=True, slots=True)
class GroupView:
    group: Group
    ratios: RatioChart | None
    speeds: tuple[SpeedChart, ...]


def write_report(runs: Sequence[Run], out_dir: Path | str, *, claims: Sequence[ClaimResult] = ()) -> tuple[Path, Path, Path]:
    """Write report.html, report.md and report.csv into a folder, which is made where it is absent. Returns their paths.

    Raises:
        ReportError: the folder cannot be made or written.
    """
    folder = Path(out_dir)
    judged = verdicts(runs)
    contents = {
        "report.html": as_html(runs, judged, claims),
        "report.md": as_markdown(runs, judged, claims),
        "report.csv": as_csv(judged),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_whole(folder / name, content)
    except OSError as error:
        words = (error.strerror or str(error)).lower()
        raise ReportError(f"cannot write a report into {folder}: {words}; choose a folder that you can write to") from None
    html, markdown, sheet = (folder / name for name in contents)
    return html, markdown, sheet


def as_html(runs: Sequence[Run], judged: Sequence[Verdict], claims: Sequence[ClaimResult]) -> str:
    """The page. Every value is escaped; the same runs give the same bytes."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flashmoe_science", "judge"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["us"] = microseconds
    environment.filters["sig"] = significant
    shown = shown_kernels(judged)[:_PALETTE]
    views = [_view(group, {kernel: place for place, kernel in enumerate(shown)}) for group in groups(judged)]
    return environment.get_template(_TEMPLATE).render(
        views=views,
        claims=claims,
        runs=_facts(runs, judged),
        said=SAID,
        shown=shown,
        ours={row.kernel for row in judged if row.origin == "ours"},
        latest=max((run.header.started for run in runs), default=None),
        superseded=superseded(runs),
        margin=MARGIN,
        min_pairs=MIN_PAIRS,
    )


def as_markdown(runs: Sequence[Run], judged: Sequence[Verdict], claims: Sequence[ClaimResult]) -> str:
    """The summary, the claims, our verdicts problem by problem, and the runs."""
    parts = ["# What the records say", "", *_summary_lines(groups(judged)), ""]
    if claims:
        parts += ["## Claims", "", "| claim | asks | measured | 95% interval | outcome |", "|---|---|---:|---|---|"]
        parts += [_claim_line(result) for result in claims] + [""]
    for group in groups(judged):
        parts += [
            f"## {_cell(group.title)}",
            "",
            "| problem | kernel | us | TFLOP/s | rival | ratio | 95% interval | verdict |",
        ]
        parts += ["|---|---|---:|---:|---|---:|---|---|", *(_verdict_line(row) for row in group.front), ""]
    parts += ["## Runs", ""]
    for facts in _facts(runs, judged):
        header = facts.run.header
        where = f"{header.suite} on {header.environment.gpu or header.environment.cpu}"
        parts.append(f"- {header.run}: {where}, {header.started}, commit {header.commit or 'unknown'}: `{facts.command}`")
    return "\n".join(parts) + "\n"


def as_csv(judged: Sequence[Verdict]) -> str:
    """Every verdict, every field."""
    names = [field.name for field in fields(Verdict) if field.name != "interval"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.as_dict() for row in judged)
    return text.getvalue()


def microseconds(nanoseconds: float | None) -> str:
    return "" if nanoseconds is None else f"{nanoseconds / 1e3:.2f}"


def significant(value: float | None, digits: int = 3) -> str:
    """Three digits that count, never in exponent form where it need not be: 0.0123, 4.57, 612."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def _view(group: Group, colours: dict[str, int]) -> GroupView:
    speeds = speed_charts(group.rows, colours) if group.clock == "graph" or group.gpu == "cpu" else []
    return GroupView(group, ratio_chart(group.front) if group.front else None, tuple(speeds))


def _facts(runs: Sequence[Run], judged: Sequence[Verdict]) -> list[RunFacts]:
    standing = {row.run for row in judged}
    found = []
    for run in sorted(runs, key=lambda run: run.header.started, reverse=True):
        notes: dict[str, int] = {}
        for row in run.rows:
            if isinstance(row, NoteRow) and not row.text.startswith("quick bench"):
                text = f"{row.kernel}: {row.text}" if row.kernel else row.text
                notes[text] = notes.get(text, 0) + (row.problem is not None)
        found.append(
            RunFacts(
                run=run,
                gpu=gpu_name(run.header.environment.gpu),
                command=shlex.join(run.header.command),
                standing=run.header.run in standing,
                end=next((row for row in run.rows if isinstance(row, EndRow)), None),
                refusals=tuple(row for row in run.rows if isinstance(row, RefusalRow)),
                notes=tuple(notes.items()),
            )
        )
    return found


def _summary_lines(found: Sequence[Group]) -> list[str]:
    if not found:
        return ["No records."]
    lines = [
        f"| | problems | ratio, geometric mean | least | most | {' | '.join(SAID)} |",
        f"|---|---:|---|---:|---:|{'---:|' * len(SAID)}",
    ]
    for group in found:
        ratios = "| | | "
        if group.mean is not None and group.least is not None and group.most is not None:
            mean = f"{group.mean.ratio:.3f} [{group.mean.low:.3f}, {group.mean.high:.3f}]"
            ratios = f"| {mean} | {group.least.ratio:.3f} | {group.most.ratio:.3f} "
        counts = " | ".join(str(group.counts[word]) for word in SAID)
        lines.append(f"| {_cell(group.title)} | {len(group.front)} {ratios}| {counts} |")
    return lines


def _claim_line(result: ClaimResult) -> str:
    interval = "" if result.low is None else f"{result.low:.3f} to {result.high:.3f}"
    measured = "" if result.measured is None else f"{result.measured:.3f}"
    told = result.outcome if result.why is None else f"{result.outcome}: {result.why}"
    cells = (result.claim.text, f"{result.claim.statistic} {result.claim.demand}", measured, interval, told)
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _verdict_line(row: Verdict) -> str:
    interval = "" if row.low is None else f"{row.low:.3f} to {row.high:.3f}"
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    told = row.verdict if row.reason is None else f"{row.verdict}: {row.reason}"
    cells = (
        row.problem,
        row.kernel,
        microseconds(row.time_ns),
        significant(row.tflops),
        row.rival or "",
        ratio,
        interval,
        told,
    )
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    """Text that neither ends a Markdown cell nor is taken for HTML."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
