"""The sections of a report, in the order in which it is read, from runs that are judged once for all its forms."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from flashmoe_science.judge.diagnose.diagnosis import Diagnosis, diagnose, gained
from flashmoe_science.judge.diagnose.facts import NoRecord
from flashmoe_science.judge.diagnose.roofline import rooflines
from flashmoe_science.judge.formats import count, duration
from flashmoe_science.judge.gate.claims import Claim, judge_claim
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.report.blocks import Block, Definitions, Heading, Page, Paragraph, Plots, Section
from flashmoe_science.judge.report.charts import colours_of, roofline_chart, speed_charts
from flashmoe_science.judge.report.tables import (
    candidate_summary,
    claim_table,
    diagnosis_blocks,
    group_table,
    group_verdicts,
    titles_of,
)
from flashmoe_science.judge.standing import JudgedRun, standing
from flashmoe_science.judge.summary import NAMED, Group, candidates, groups
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import EndRow, NoteRow, RefusalRow, TimingRow
from flashmoe_science.store import Run

_MOST_DIAGNOSED = 6  # problems of one candidate, and of ours under one set of conditions
_HOUR_S = 3600.0
_CLAIMS = "A claim holds only if the whole interval reaches what it asks, and every problem that it is about has a number."
_OF_OURS = (
    "One verdict a problem: the fastest of our kernels against the best peer of that problem, or, in a run without ours, the "
    "fastest kernel against the best other. Above 1 the kernel is faster."
)
_ROOFLINE = (
    "Each dot is a kernel on one problem, by device time. A full line is a ceiling that this machine was measured to reach, a "
    "dashed one what is specified. Traffic is what the problem cannot do without. A diagnosis has a kernel's share of each "
    "ceiling."
)
_DIAGNOSIS = (
    "Why a user's kernel, or ours where it loses or wins least, is not faster. Each cause is supported, ruled out or untested. "
    "A change cannot give more than the part of the time that it speeds up allows (Amdahl), nor several together more than the "
    "ceiling that binds."
)


class Contents:
    """Runs judged in every way that a report shows; what is judged already is not judged again."""

    def __init__(self, judged: Sequence[JudgedRun], claims: Sequence[Claim] = ()) -> None:
        self.judged = {one.run.header.run: one for one in judged}
        self.runs = sorted((one.run for one in judged), key=lambda run: run.header.started, reverse=True)  # the latest first
        self.verdicts = standing(judged)
        found = groups(self.verdicts)
        self.own = sorted((group for group in found if not group.tried), key=lambda group: group.suite == NAMED)
        self.tried = [group for group in found if group.tried]
        self.candidates = candidates(self.runs, self.verdicts)
        self.claims = [judge_claim(claim, self.verdicts, judged) for claim in claims]
        self.diagnoses = _diagnoses(self.runs, found, self.verdicts)
        # Whether the report is about users' kernels alone, compared with which ours are peers.
        self.of_candidates = bool(self.candidates) and not self.own
        self.titles = titles_of([*self.own, *self.tried])


def _diagnoses(runs: Sequence[Run], found: Sequence[Group], judged: Sequence[Verdict]) -> list[Diagnosis]:
    """Why a candidate is as slow as it is, and ours where it loses, the worst first, or where it never does, wins least."""
    chosen: list[Verdict] = []
    for group in found:
        if group.clock == "graph" or group.gpu == "cpu":
            ours = [row for row in group.front if row.origin == "ours"]
            losing = [row for row in ours if row.verdict in ("slower", "refused")]
            chosen += _worst(losing) or _worst([row for row in ours if row.ratio is not None])[:1]
    for rows in grouped((row for row in judged if row.brought), lambda row: row.kernel).values():
        chosen += _worst(rows)
    made = []
    for problem, kernel, gpu in dict.fromkeys((row.problem, row.kernel, row.gpu) for row in chosen):
        try:
            made.append(diagnose(runs, problem, kernel, gpu))
        except NoRecord:
            continue  # it was refused before anything was measured; the refusal has the reason
    return [one for one in made if any(cause.status != "untested" for cause in one.hypotheses)]


def _worst(rows: Sequence[Verdict]) -> list[Verdict]:
    return sorted(rows, key=lambda row: 0.0 if row.ratio is None else row.ratio)[:_MOST_DIAGNOSED]


def page_of(contents: Contents) -> Page:
    """The whole report. It opens on the project's own kernels, or, where there are none, on the kernels that users brought."""
    of_users = contents.of_candidates
    sections = [
        Section("summary", "Summary", tuple(_summary(contents))),
        Section("claims", "Claims", (Paragraph(_CLAIMS), claim_table(contents.claims)) if contents.claims else ()),
        *(_group(group, contents) for group in (contents.tried if of_users else contents.own)),
        Section("roofline", "Roofline", tuple(_roofline(contents))),
        Section("diagnosis", "Diagnosis and plan", tuple(_diagnosis(contents))),
        Section("candidates", "Users' kernels and examples", () if of_users else tuple(_candidates(contents))),
        Section("runs", "Runs", tuple(_runs(contents))),
    ]
    names = ", ".join(one.name for one in contents.candidates)
    latest = f", the latest of {contents.runs[0].header.started[:10]}" if contents.runs else ""
    lead = f"FlashMoE-Science. {count(len(contents.runs), 'run')}{latest}."
    return Page(names if of_users else "What the records say", lead, tuple(one for one in sections if one.blocks))


def _summary(contents: Contents) -> Iterator[Block]:
    for one in contents.candidates if contents.of_candidates else ():
        yield from candidate_summary(one)
    leading = contents.tried if contents.of_candidates else contents.own
    if contents.own:
        yield Paragraph(_OF_OURS)
    elif not contents.of_candidates:
        yield Paragraph("No verdict can be given: the runs hold no timings and no refusals of a kernel.")
    if leading:
        yield group_table(leading)
    if contents.runs:
        yield Paragraph("To repeat the latest run:", "dim")
        yield Paragraph(shlex.join(contents.runs[0].header.command), "code")


def _candidates(contents: Contents) -> Iterator[Block]:
    """Kernels that users brought, in a report that is not about them alone."""
    if not contents.candidates:
        return
    yield Paragraph("Some of these are examples that are slow or wrong on purpose.")
    yield group_table(contents.tried)
    for one in contents.candidates:
        yield from candidate_summary(one)
        yield from _diagnosed(contents, {one.name})
    for group in contents.tried:
        yield from group_verdicts(group, contents.judged)


def _diagnosed(contents: Contents, kernels: Collection[str]) -> Iterator[Block]:
    for one in contents.diagnoses:
        if one.facts.kernel in kernels:
            yield from diagnosis_blocks(one, gained(one, contents.runs))


def _group(group: Group, contents: Contents) -> Section:
    """The speeds and the verdicts of one suite under one set of conditions."""
    blocks: list[Block] = []
    colours = colours_of(group.rows)
    charts = speed_charts(group.rows, colours) if group.clock == "graph" or group.gpu == "cpu" else []
    if charts:
        blocks.append(Heading("Speed against length, TFLOP/s"))
        blocks.append(Plots(tuple(charts), _legend(colours, group.rows)))
    return Section(group.anchor, contents.titles[group.anchor], (*blocks, *group_verdicts(group, contents.judged)))


def _legend(colours: dict[str, int], rows: Sequence[Verdict]) -> tuple[tuple[str, int, str], ...]:
    origins = {row.kernel: row.origin or "" for row in rows}
    return tuple((kernel, place, origins[kernel]) for kernel, place in colours.items())


def _roofline(contents: Contents) -> Iterator[Block]:
    rows = [row for group in (contents.own or contents.tried) for row in group.rows]
    drawn = [one for one in rooflines(contents.runs, rows) if any(point.needs for point in one.points)]
    if drawn:
        yield Paragraph(_ROOFLINE)
    colours = colours_of(rows)
    for one in drawn:
        present = {point.kernel for point in one.points}
        if (chart := roofline_chart(one, colours)) is not None:
            yield Plots((chart,), tuple(entry for entry in _legend(colours, rows) if entry[0] in present))


def _diagnosis(contents: Contents) -> Iterator[Block]:
    if contents.diagnoses:
        yield Paragraph(_DIAGNOSIS)
    elsewhere = set() if contents.of_candidates else {one.name for one in contents.candidates}
    yield from _diagnosed(contents, {one.facts.kernel for one in contents.diagnoses} - elsewhere)


def _runs(contents: Contents) -> Iterator[Block]:
    """What the runs took in all, then each, the latest first."""
    if contents.runs:
        yield Paragraph(f"{cost_line(contents.runs)}.")
    standing = {row.run for row in contents.verdicts}
    for run in contents.runs:
        yield Heading(
            f"{run.header.suite}, {run.header.started}",
            "" if run.header.run in standing else "superseded, or without verdicts",
        )
        yield from _run(run)


def _run(run: Run) -> Iterator[Block]:
    """How to repeat a run, where and with what it was made, what stopped all of it, and its notes."""
    header, where = run.header, run.header.environment
    memory = f"{where.gpu_memory_bytes / 2**30:.0f} GiB, " if where.gpu_memory_bytes else ""
    gpu = f"{where.gpu}, {where.sm_count} SMs, {memory}driver {where.driver}, CUDA {where.cuda}, " if where.gpu else ""
    packages = "".join(f", {name} {version}" for name, version in sorted(where.packages.items()))
    refused = (row for row in run.of(RefusalRow) if row.kernel is None)
    items = [
        ("run", header.run, ""),
        ("commit", f"commit {header.commit or 'unknown'}, sources {header.source_digest[:16]}, seed {header.seed}", ""),
        ("machine", f"{gpu}{where.cpu}, {where.cpu_count} cores, {where.platform}", ""),
        ("software", f"Python {where.python}, torch {where.torch}, Triton {where.triton or 'absent'}{packages}", ""),
        ("took", cost_line([run]), ""),
        *([("torn", f"{run.torn}; that row is left out", "slower")] if run.torn else ()),
        *(("refused", f"{row.problem or 'every problem'}: {row.reason}", "refused") for row in refused),
    ]
    yield Paragraph(shlex.join(header.command), "code")
    yield Definitions(tuple(items), page_only=False)
    notes = Counter[str]()
    for row in run.of(NoteRow):
        if not row.text.startswith("quick bench"):
            notes[f"{row.kernel}: {row.text}" if row.kernel else row.text] += row.problem is not None
    if notes:
        listed = tuple((f"{problems} problems" if problems else "", text, "") for text, problems in notes.items())
        yield Definitions(listed, count(len(notes), "note"))


def cost_line(runs: Sequence[Run]) -> str:
    """Time and money of these runs in one line: "2 runs, 20 min 00 s, of which 2.0 s timed: $1.20". A machine is paid for by
    the wall clock, building and checking included; a run that was cut short took at least the seconds in which it sampled."""
    timed, took, spent = 0.0, 0.0, []
    for run in runs:
        sampled = math.fsum(row.device_seconds for row in run.of(TimingRow))
        seconds = next((row.wall_seconds for row in run.of(EndRow)), sampled)
        timed, took = timed + sampled, took + seconds
        if run.header.price_per_hour is not None:
            spent.append(run.header.price_per_hour * seconds / _HOUR_S)
    words = f"{count(len(runs), 'run')}, {duration(took)}, of which {duration(timed)} timed"
    cost = f": ${math.fsum(spent):.2f}" if spent else "; no price is known"
    return words + cost + (f" for the {len(spent)} that have a price" if 0 < len(spent) < len(runs) else "")
