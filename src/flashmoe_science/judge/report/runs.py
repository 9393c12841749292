"""What the runs of a report were: where and when, what they refused, what they took, and how to repeat them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from flashmoe_science.judge.formats import duration, percent, usd
from flashmoe_science.judge.report.blocks import Block, Cell, Definitions, Heading, Paragraph, Row, columns, table
from flashmoe_science.judge.report.contents import Contents
from flashmoe_science.judge.report.cost import cost_line, kernel_costs
from flashmoe_science.judge.report.tables import verdict_table
from flashmoe_science.records import EndRow, NoteRow
from flashmoe_science.store import Run

_REFUSALS = columns("k:kernel", "words:reason", "stage", "mono:where")
_COSTS = columns("mono:run", "suite", "machine", "n:wall", "n:timed", "n:USD an hour", "n:USD")
_KERNEL_COSTS = columns("k:kernel", "n:timed", "n:share", "n:USD")


def refusals(contents: Contents) -> Iterator[Block]:
    """The numbers that were not given, and why."""
    if not contents.refusals:
        yield Paragraph("None: every number that was asked for was given.")
        return
    rows = []
    for one in sorted(contents.refusals, key=lambda one: one.candidate != contents.of_candidates):
        more = f" and {len(one.problems) - 3} more" if len(one.problems) > 3 else ""
        cells = (
            Cell(one.kernel or "the whole problem", one.config or None),
            Cell(one.reason, state="refused"),
            Cell(one.stage),
            Cell("; ".join(one.problems[:3]) + more, one.gpu),
        )
        rows.append(Row(cells, "candidate" if one.candidate else ""))
    yield table("refusals", "Refusals", _REFUSALS, rows)


def cost(contents: Contents) -> Iterator[Block]:
    """Time and money, a run, a kernel and in all."""
    if not contents.costs:
        return
    yield Paragraph(f"{cost_line(contents.costs)}.")
    rows = [
        Row(
            (
                Cell(one.run),
                Cell(one.suite),
                Cell(one.gpu),
                Cell("cut short" if one.wall_seconds is None else duration(one.wall_seconds)),
                Cell(duration(one.timed_seconds)),
                Cell("" if one.price_per_hour is None else f"{one.price_per_hour:.2f}"),
                Cell(usd(one.usd)),
            )
        )
        for one in contents.costs
    ]
    yield table("costs", "Cost of runs", _COSTS, rows)
    kernels = kernel_costs(contents.costs)
    total = sum(one.seconds for one in kernels)
    rows = [
        Row((Cell(one.kernel), Cell(duration(one.seconds)), Cell(percent(one.seconds / total)), Cell(usd(one.usd))))
        for one in kernels
        if total
    ]
    if rows:
        fold = f"Kernel by kernel: {len(kernels)}, while they were timed"
        yield table("kernels", "Cost of kernels", _KERNEL_COSTS, rows, fold, page_only=True)


def runs(contents: Contents) -> Iterator[Block]:
    """The runs, the latest first, and the verdicts that later runs replaced."""
    standing = {row.run for row in contents.verdicts}
    for run in contents.runs:
        yield from _run(run, run.header.run in standing)
    if contents.superseded:
        fold = f"History: {len(contents.superseded)} verdicts that later runs replaced"
        yield verdict_table("Replaced verdicts", contents.superseded, fold, page_only=True)


def _run(run: Run, standing: bool) -> Iterator[Block]:
    """Where, when and with what a run was made, and how to repeat it."""
    header, where = run.header, run.header.environment
    end = next((row for row in run.rows if isinstance(row, EndRow)), None)
    memory = f"{where.gpu_memory_bytes / 2**30:.0f} GiB, " if where.gpu_memory_bytes else ""
    gpu = [f"{where.gpu}, {where.sm_count} SMs, {memory}driver {where.driver}, CUDA {where.cuda}"] if where.gpu else []
    packages = "".join(f", {name} {version}" for name, version in sorted(where.packages.items()))
    commit = f"commit {header.commit or 'unknown'}, sources {header.source_digest[:16]}, seed {header.seed}"
    yield Heading(f"{header.suite}, {header.started}", "" if standing else "superseded, or without verdicts")
    yield Paragraph(shlex.join(header.command), "code")
    items = [
        ("run", header.run, ""),
        ("commit", commit, ""),
        ("machine", ", ".join([*gpu, f"{where.cpu}, {where.cpu_count} cores, {where.platform}"]), ""),
        ("software", f"Python {where.python}, torch {where.torch}, Triton {where.triton or 'absent'}{packages}", ""),
        ("took", f"{duration(end.wall_seconds)}, of which {duration(end.device_seconds)} timed" if end else "cut short", ""),
    ]
    if run.torn:
        items.append(("torn", f"{run.torn}; that row is left out", "slower"))
    yield Definitions(tuple(items), page_only=False)
    notes: dict[str, int] = {}
    for row in run.rows:
        if isinstance(row, NoteRow) and not row.text.startswith("quick bench"):
            text = f"{row.kernel}: {row.text}" if row.kernel else row.text
            notes[text] = notes.get(text, 0) + (row.problem is not None)
    if notes:
        listed = tuple((f"{count} problems" if count else "", text, "") for text, count in notes.items())
        yield Definitions(listed, f"{len(notes)} note{'s' * (len(notes) != 1)}")
