"""The sections of a report in their order, from runs that are judged once for HTML, Markdown and CSV alike."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from flashmoe_science.judge.diagnose.diagnosis import Diagnosis, diagnose, gained
from flashmoe_science.judge.diagnose.facts import NoRecord
from flashmoe_science.judge.diagnose.roofline import rooflines
from flashmoe_science.judge.formats import count, duration, times
from flashmoe_science.judge.gate.claims import Claim, ClaimResult, judge_claim
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.report.blocks import Block, Definitions, Fold, Heading, Page, Paragraph, Plots, Section
from flashmoe_science.judge.report.charts import colours_of, roofline_chart, speed_charts
from flashmoe_science.judge.report.tables import (
    candidate_summary,
    claim_table,
    diagnosis_blocks,
    group_bars,
    group_table,
    group_verdicts,
    titles_of,
    verdict_table,
)
from flashmoe_science.judge.standing import JudgedRun, standing
from flashmoe_science.judge.stats import call, geometric_mean
from flashmoe_science.judge.summary import NAMED, Group, candidates, counts_in_words, groups, of_suites
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import EndRow, NoteRow, RefusalRow, TimingRow
from flashmoe_science.store import Run

_MOST_DIAGNOSED = 6  # problems of one candidate, and of ours under one set of conditions
_MOST_FOLDS = 5  # runs or diagnoses that stand by themselves
_MOST_LOST = 5  # rows that the summary shows, the worst first
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
    """All that a report shows of runs, judged once."""

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
        self.titles = titles_of(self.tried)


def _diagnoses(runs: Sequence[Run], found: Sequence[Group], judged: Sequence[Verdict]) -> list[Diagnosis]:
    """Diagnoses of users' kernels, and of ours where they lose, the worst losses first, or else where they win least."""
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
        Section("claims", "Claims", tuple(_claims(contents.claims))),
        *(Section(one.anchor, contents.titles[one.anchor], tuple(_group(one, contents))) for one in contents.tried if of_users),
        Section("suites", "Suites", tuple(_suites(contents))),
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
    if contents.own:
        yield from _won_and_lost(contents.own)
    elif contents.of_candidates:
        yield group_table(contents.tried)
    else:
        yield Paragraph("No verdict can be given: the runs hold no timings and no refusals of a kernel.")
    if contents.runs:
        yield Paragraph("To repeat the latest run:", "dim")
        yield Paragraph(shlex.join(contents.runs[0].header.command), "code")


def _won_and_lost(own: Sequence[Group]) -> Iterator[Block]:
    """The verdicts on one clock in a sentence, a bar for each suite, the worst losses; then all groups, folded."""
    leading = _leading(own)
    rows = of_suites([row for group in leading for row in group.measured])
    if rows:
        mean = geometric_mean([row.interval for row in rows if row.interval is not None])
        counted = Counter[str](row.verdict for row in rows)
        clock = "by device time" if leading[0].clock == "graph" else "by end-to-end latency"
        found = f"the best rival's speed {clock}, on average over {count(len(rows), 'problem')}: {counts_in_words(counted)}."
        yield Paragraph(found, "big", times(mean.ratio), call(mean))
        yield group_bars(leading)
    yield Paragraph(_OF_OURS, "dim")
    if slower := sorted((row for row in rows if row.verdict == "slower"), key=lambda row: row.ratio or 0.0):
        yield Heading(f"Slower than the best rival: {len(slower)} of {len(rows)}", "the worst first")
        yield verdict_table("Slower than the best rival", slower[:_MOST_LOST])
    yield Fold(f"Every suite, clock and cache: {len(own)}", (group_table(own),))


def _leading(groups: Sequence[Group]) -> list[Group]:
    """The groups of the graph clock, or all where there are none."""
    return [group for group in groups if group.clock == "graph"] or list(groups)


def _claims(claims: Sequence[ClaimResult]) -> Iterator[Block]:
    """The claims that do not hold, then those that hold in a fold."""
    if claims:
        yield Paragraph(_CLAIMS)
        found = grouped(claims, lambda one: one.outcome == "holds")
        if others := found.get(False):
            yield claim_table(others)
        if holding := found.get(True):
            yield Fold(f"{count(len(holding), 'claim')} of {len(claims)} that hold", (claim_table(holding),))


def _candidates(contents: Contents) -> Iterator[Block]:
    """Kernels that users brought, in a report that is not about them alone."""
    if not contents.candidates:
        return
    yield Paragraph("Some of these are examples that are slow or wrong on purpose.")
    yield Fold(f"By suite, clock and cache: {len(contents.tried)}", (group_table(contents.tried),))
    for one in contents.candidates:
        found = tuple(candidate_summary(one))[1:]
        yield Fold(f"{one.name}: {one.headline}", (*found, *_diagnosed(contents, {one.name})))
    yield from _folded(contents.tried, contents)


def _diagnosed(contents: Contents, kernels: Collection[str]) -> Iterator[Fold]:
    for one in contents.diagnoses:
        if one.facts.kernel in kernels:
            _, *found = diagnosis_blocks(one, gained(one, contents.runs))
            yield Fold(f"{one.facts.kernel} on {one.facts.problem}, {one.facts.machine}: {one.cause}", tuple(found))


def _suites(contents: Contents) -> Iterator[Fold]:
    leading = _leading(contents.own)
    yield from _folded(leading, contents)
    if others := [group for group in contents.own if group not in leading]:
        yield Fold(f"End-to-end latency (eager clock): {len(others)}", tuple(_folded(others, contents)))


def _folded(groups: Iterable[Group], contents: Contents) -> Iterator[Fold]:
    for group in groups:
        mean = f"{times(group.mean.ratio)} on average; " if group.mean else ""
        yield Fold(f"{group.title}: {mean}{counts_in_words(group.counts)}", tuple(_group(group, contents)))


def _group(group: Group, contents: Contents) -> Iterator[Block]:
    """The speeds and the verdicts of one suite under one set of conditions."""
    colours = colours_of(group.rows)
    charts = speed_charts(group.rows, colours) if group.clock == "graph" or group.gpu == "cpu" else []
    if charts:
        yield Heading("Speed against length, TFLOP/s")
        yield Plots(tuple(charts), _legend(colours, group.rows))
    yield from group_verdicts(group, contents.judged)


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
            plots = Plots((chart,), tuple(entry for entry in _legend(colours, rows) if entry[0] in present))
            yield Fold(f"{chart.title}: {count(len(one.points), 'point')}", (plots,))


def _diagnosis(contents: Contents) -> Iterator[Block]:
    if contents.diagnoses:
        yield Paragraph(_DIAGNOSIS)
    elsewhere = set() if contents.of_candidates else {one.name for one in contents.candidates}
    found = _diagnosed(contents, {one.facts.kernel for one in contents.diagnoses} - elsewhere)
    yield from _shortened(tuple(found), "more problem")


def _runs(contents: Contents) -> Iterator[Block]:
    """What the runs took in all, then each, the latest first."""
    if contents.runs:
        yield Paragraph(f"{cost_line(contents.runs)}.")
    standing = {row.run for row in contents.verdicts}
    folds = []
    for run in contents.runs:
        note = "" if run.header.run in standing else " (superseded, or without verdicts)"
        folds.append(Fold(f"{run.header.suite}, {run.header.started}{note}", tuple(_run(run))))
    yield from _shortened(folds, "earlier run")


def _shortened(folds: Sequence[Fold], what: str) -> Iterator[Fold]:
    """The first few folds; the others in one more."""
    yield from folds[:_MOST_FOLDS]
    if rest := tuple(folds[_MOST_FOLDS:]):
        yield Fold(count(len(rest), what), rest)


def _run(run: Run) -> Iterator[Block]:
    """The command that repeats a run, its machine and software, what was refused for all kernels, and its notes."""
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
        yield Fold(count(len(notes), "note"), (Definitions(listed),))


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
