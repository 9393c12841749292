"""The sections of a report, in the order in which it is read."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from flashmoe_science.judge.diagnose.roofline import rooflines
from flashmoe_science.judge.report.blocks import (
    Block,
    Definitions,
    Heading,
    Page,
    Paragraph,
    Plots,
    Ratios,
    Section,
)
from flashmoe_science.judge.report.charts import colours_of, ratio_chart, speed_charts
from flashmoe_science.judge.report.contents import Contents
from flashmoe_science.judge.report.diagnoses import diagnosis_blocks, prediction_table
from flashmoe_science.judge.report.roofline_chart import roofline_chart
from flashmoe_science.judge.report.runs import refusals, runs
from flashmoe_science.judge.report.tables import (
    candidate_summary,
    claim_table,
    group_table,
    group_verdicts,
    titles_of,
)
from flashmoe_science.judge.stats import MARGIN, MIN_PAIRS
from flashmoe_science.judge.summary import Group
from flashmoe_science.judge.verdicts import Verdict

_READING = (
    ("faster, slower", "The whole 95% interval of the ratio is on that side of 1.", ""),
    ("equivalent", f"The whole interval lies within {MARGIN:.0%} of 1.", ""),
    ("undecided", f"The samples do not support any of these, or fewer than {MIN_PAIRS} pairs were taken.", ""),
    (
        "refused",
        "Something speaks against the number, so there is none: a wrong result, a kernel that was not seen to run, a throttled "
        "GPU, a time that the chip cannot reach, or a kernel that did not tie with itself.",
        "",
    ),
    ("graph clock", "Device time alone: many calls in one CUDA graph, timed by events.", ""),
    ("eager clock", "What a caller waits: calls one after the other, on the wall clock.", ""),
    ("cold cache", "The inputs were not in the L2 cache when a call began.", ""),
    (
        "ratio",
        "The rival's time over the kernel's: above 1 the kernel is faster. Kernel and rival are sampled in turn (A B B A) in "
        "one process on the same inputs, so that drift of the clocks cancels. The ratio is the median over pairs; its interval "
        "is a block bootstrap, widened by the clock's resolution. Outliers are kept.",
        "",
    ),
    ("TFLOP/s, GB/s", "Unmasked products alone; inputs and output once.", ""),
)


def page_of(contents: Contents) -> Page:
    """The whole report. It opens on the project's own kernels, or, where there are none, on the kernels that users brought."""
    of_users = contents.of_candidates
    sections = [Section("summary", "Summary", tuple(_summary(contents)))]
    if contents.claims:
        rule = "A claim holds only if the whole interval reaches what it asks, and every problem that it is about has a number."
        sections.append(Section("claims", "Claims", (Paragraph(rule), claim_table(contents.claims))))
    sections += [_group(group, contents) for group in (contents.tried if of_users else contents.own)]
    sections += [
        Section("roofline", "Roofline", tuple(_roofline(contents))),
        Section("diagnosis", "Diagnosis and plan", tuple(_diagnosis(contents))),
        Section("refusals", "Refusals", tuple(refusals(contents))),
    ]
    if contents.candidates and not of_users:
        sections.append(Section("candidates", "Users' kernels and examples", tuple(_candidates(contents))))
    sections += [
        Section("runs", "Runs", tuple(runs(contents))),
        Section("reading", "How to read this", (Definitions(_READING),)),
    ]
    names = ", ".join(one.name for one in contents.candidates)
    days = max((run.header.started[:10] for run in contents.runs), default=None)
    lead = f"FlashMoE-Science. {len(contents.runs)} run{'s' * (len(contents.runs) != 1)}"
    return Page(names if of_users else "What the records say", lead + (f", the latest of {days}." if days else "."),
                tuple(section for section in sections if section.blocks))  # fmt: skip


def _summary(contents: Contents) -> Iterator[Block]:
    leading = contents.tried if contents.of_candidates else contents.own
    if contents.of_candidates:
        for one in contents.candidates:
            yield from candidate_summary(one)
    elif not contents.own:
        yield Paragraph("No verdict can be given: the runs hold no timings and no refusals of a kernel.")
    if leading:
        if not contents.of_candidates:
            yield Paragraph(
                "One verdict a problem: the fastest of our kernels against the best peer of that problem, or, in a run without "
                "ours, the fastest kernel against the best other. Above 1 the kernel is faster."
            )
        yield group_table(leading)
    if contents.runs:
        yield Paragraph("To repeat the latest run:", "dim")
        yield Paragraph(shlex.join(contents.runs[0].header.command), "code")


def _candidates(contents: Contents) -> Iterator[Block]:
    """Kernels that users brought, in a report that is not about them alone."""
    yield Paragraph("Some of these are examples that are slow or wrong on purpose.")
    yield group_table(contents.tried)
    for one in contents.candidates:
        yield from candidate_summary(one)
        for diagnosed in contents.diagnoses:
            if diagnosed.kernel == one.name:
                yield from diagnosis_blocks(diagnosed)
    for group in contents.tried:
        yield from group_verdicts(group, contents.judged)


def _group(group: Group, contents: Contents) -> Section:
    """The ratios, the speeds and the verdicts of one suite under one set of conditions."""
    blocks: list[Block] = [Ratios(f"Ratios with 95% intervals, {group.title}", ratio_chart(group.front))] if group.front else []
    colours = colours_of(group.rows)
    charts = speed_charts(group.rows, colours) if group.clock == "graph" or group.gpu == "cpu" else []
    if charts:
        blocks.append(Heading("Speed against length, TFLOP/s"))
        blocks.append(Plots(tuple(charts), _legend(colours, group.rows)))
    return Section(group.anchor, titles_of(contents.groups)[group.anchor], (*blocks, *group_verdicts(group, contents.judged)))


def _legend(colours: dict[str, int], rows: Sequence[Verdict]) -> tuple[tuple[str, int, str], ...]:
    origins = {row.kernel: row.origin or "" for row in rows}
    return tuple((kernel, place, origins[kernel]) for kernel, place in colours.items())


def _roofline(contents: Contents) -> Iterator[Block]:
    rows = [row for group in (contents.own or contents.tried) for row in group.rows]
    drawn = [one for one in rooflines(contents.runs, rows) if any(point.needs for point in one.points)]
    if drawn:
        yield Paragraph(
            "Each dot is a kernel on one problem, by device time. A full line is a ceiling that this machine was measured to "
            "reach, a dashed one what is specified. Traffic is what the problem cannot do without, or what was counted. A "
            "diagnosis has a kernel's share of each ceiling."
        )
    colours = colours_of(rows)
    for one in drawn:
        present = {point.kernel for point in one.points}
        if (chart := roofline_chart(one, colours)) is not None:
            yield Plots((chart,), tuple(entry for entry in _legend(colours, rows) if entry[0] in present))


def _diagnosis(contents: Contents) -> Iterator[Block]:
    if contents.diagnoses:
        yield Paragraph(
            "Why a user's kernel, or ours where it loses or wins least, is not faster. Each cause is supported, ruled out or "
            "untested. A change cannot give more than the part of the time that it speeds up allows (Amdahl), nor several "
            "together more than the ceiling that binds."
        )
    names = {one.name for one in contents.candidates}
    for one in contents.diagnoses:
        if contents.of_candidates or one.kernel not in names:
            yield from diagnosis_blocks(one)
    if contents.predictions:
        yield Heading("Recorded predictions and what they came to")
        yield prediction_table(contents.predictions)
