"""What a report shows, gathered from runs and verdicts: plain values, with nothing left for the page to work out."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashmoe_science.judge.charts import Ratio, RatioChart, SpeedChart, ratio_chart, ratio_of, speed_charts
from flashmoe_science.judge.diagnosis import Diagnosis, NothingKnown, diagnose
from flashmoe_science.judge.stats import MARGIN, call
from flashmoe_science.judge.summary import Group
from flashmoe_science.judge.trust import Control, Trust, gpu_name
from flashmoe_science.judge.verdicts import Verdict, is_brought
from flashmoe_science.records import EndRow, NoteRow, RefusalRow
from flashmoe_science.store import Run

_Reason = tuple[str | None, bool, str, str, str, str]  # kernel, brought by a user, stage, reason, GPU, config

_MOST_DIAGNOSED = 6  # problems of one candidate, and of ours under one set of conditions


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run as the report shows it: where, when, with what, what it refused, and how to do it again."""

    run: Run
    gpu: str
    command: str
    standing: bool  # whether a verdict that stands rests on it
    end: EndRow | None
    refusals: int
    notes: tuple[tuple[str, int], ...]  # distinct texts with the number of problems that they were made on


@dataclass(frozen=True, slots=True)
class GroupView:
    group: Group
    ratios: RatioChart | None
    speeds: tuple[SpeedChart, ...]
    legend: tuple[tuple[str, int, str], ...]  # kernels of the speed charts, each with its colour and origin


@dataclass(frozen=True, slots=True)
class ControlView:
    """The kernel-against-itself controls of a group, and what its samples could have shown."""

    group: Group
    controls: int
    equivalent: int
    widened: int  # not proven to tie, so that intervals were widened
    refused: int
    furthest: str | None  # the control furthest from 1, in words
    chart: RatioChart | None
    detectable: tuple[float, float] | None  # median and most, over the group's front


@dataclass(frozen=True, slots=True)
class Refused:
    """One reason for which a kernel got no number, and where."""

    kernel: str | None  # None: the whole problem, or run
    candidate: bool
    stage: str
    reason: str
    problems: tuple[str, ...]
    gpu: str
    config: str


def group_view(group: Group, colours: Mapping[str, int]) -> GroupView:
    speeds = speed_charts(group.rows, dict(colours)) if group.clock == "graph" or group.gpu == "cpu" else []
    chart = ratio_chart([ratio_of(row) for row in group.front]) if group.front else None
    drawn = {line.kernel: (line.kernel, line.colour, line.origin) for one in speeds for line in one.lines}
    return GroupView(group, chart, tuple(speeds), tuple(drawn[kernel] for kernel in colours if kernel in drawn))


def run_facts(runs: Sequence[Run], judged: Sequence[Verdict]) -> list[RunFacts]:
    """The latest run first."""
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
                gpu=gpu_name(run.header.environment),
                command=shlex.join(run.header.command),
                standing=run.header.run in standing,
                end=next((row for row in run.rows if isinstance(row, EndRow)), None),
                refusals=sum(isinstance(row, RefusalRow) for row in run.rows),
                notes=tuple(notes.items()),
            )
        )
    return found


def control_view(group: Group, runs: Sequence[Run]) -> ControlView:
    """What the controls of a group's standing problems came to."""
    trust = {run.header.run: Trust(run) for run in runs if run.header.run in {row.run for row in group.rows}}
    found: dict[str, Control] = {}
    for row in group.rows:
        if row.problem in found:
            continue
        control = trust[row.run].control(row.problem, row.clock, row.cache)
        if control.interval is not None or control.reason == row.reason:  # else nothing was timed, and none was owed
            found[row.problem] = control
    rows = [_control_ratio(problem, control) for problem, control in found.items()]
    told = [row for row in rows if row.ratio is not None]
    furthest = max(told, key=lambda row: abs((row.ratio or 1.0) - 1.0), default=None)
    could = sorted(row.detectable for row in group.front if row.detectable is not None)
    return ControlView(
        group=group,
        controls=len(found),
        equivalent=sum(row.said == "equivalent" for row in rows),
        widened=sum(row.said == "undecided" for row in rows),
        refused=sum(row.said == "refused" for row in rows),
        furthest=f"{furthest.told} on {furthest.label}" if furthest else None,
        chart=ratio_chart(rows, 1 - 1.5 * MARGIN, 1 + 1.5 * MARGIN) if told else None,
        detectable=(could[len(could) // 2], could[-1]) if could else None,
    )


def _control_ratio(problem: str, control: Control) -> Ratio:
    interval = control.interval
    said = "refused" if control.reason else "undecided" if control.bias else "equivalent"
    if interval is None:
        return Ratio(problem, said, "no control", f"{problem}: {control.reason}", None, None, None)
    told = f"{interval.ratio:.4f}"
    title = f"{problem}: {interval.ratio:.4f} [{interval.low:.4f}, {interval.high:.4f}], {call(interval)}"
    return Ratio(problem, said, told, title, interval.ratio, interval.low, interval.high)


def refused(runs: Sequence[Run], judged: Sequence[Verdict]) -> list[Refused]:
    """Every refusal of a standing run, candidates first, and those that stand only in verdicts; equal ones are one."""
    standing = {row.run for row in judged}
    merged: dict[_Reason, list[str]] = defaultdict(list)
    spoken: set[tuple[str, str, str | None]] = set()
    for run in sorted(runs, key=lambda run: run.header.started, reverse=True):
        if run.header.run not in standing and any(row.gpu == gpu_name(run.header.environment) for row in judged):
            continue  # an older run, which another replaced
        origins = Trust(run).origins
        for row in run.rows:
            if isinstance(row, RefusalRow):
                theirs = row.kernel is not None and is_brought(row.kernel, origins.get(row.kernel))
                key: _Reason = (
                    row.kernel,
                    theirs,
                    row.stage,
                    row.reason,
                    gpu_name(run.header.environment),
                    row.config or "",
                )
                merged[key].append(row.problem or "every problem")
                spoken.add((run.header.run, row.problem or "", row.kernel))
    for verdict in judged:
        if verdict.verdict == "refused" and (verdict.run, verdict.problem, verdict.kernel) not in spoken:
            theirs = verdict.brought
            key = (verdict.kernel, theirs, "judged", verdict.reason or "", verdict.gpu, verdict.config)
            merged[key].append(verdict.problem)
    found = [
        Refused(kernel, theirs, stage, reason, tuple(dict.fromkeys(problems)), gpu, config)
        for (kernel, theirs, stage, reason, gpu, config), problems in merged.items()
    ]
    return sorted(found, key=lambda one: not one.candidate)


def diagnoses(runs: Sequence[Run], found: Sequence[Group], judged: Sequence[Verdict]) -> list[Diagnosis]:
    """Why a candidate is as slow as it is, and ours where it loses, the worst first, or where it never does, wins least."""
    wanted: dict[tuple[str, str, str], None] = {}
    theirs: dict[str, list[Verdict]] = defaultdict(list)
    for row in judged:
        if row.brought:
            theirs[row.kernel].append(row)
    for rows in theirs.values():
        wanted |= dict.fromkeys((row.problem, row.kernel, row.gpu) for row in _worst(rows))
    for group in found:
        if group.clock == "graph" or group.gpu == "cpu":
            ours = [row for row in group.front if row.origin == "ours"]
            losing = [row for row in ours if row.verdict in ("slower", "refused")]
            chosen = _worst(losing) or _worst([row for row in ours if row.ratio is not None])[:1]
            wanted |= dict.fromkeys((row.problem, row.kernel, row.gpu) for row in chosen)
    told = []
    for problem, kernel, gpu in wanted:
        try:
            told.append(diagnose(runs, problem, kernel, gpu=gpu))
        except NothingKnown:
            continue  # it was refused before anything of it was seen; the refusal says why
    return [one for one in told if any(cause.status != "untested" for cause in one.hypotheses)]


def _worst(rows: Sequence[Verdict]) -> list[Verdict]:
    return sorted(rows, key=lambda row: 0.0 if row.ratio is None else row.ratio)[:_MOST_DIAGNOSED]
