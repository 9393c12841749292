"""What the runs of a report were: where and when, what they refused, what they took, and how to repeat them."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator

from flashmoe_science.judge.report.blocks import Block, Cell, Definitions, Heading, Paragraph, Row, Table, columns
from flashmoe_science.judge.report.contents import Contents
from flashmoe_science.judge.report.cost import cost_line
from flashmoe_science.judge.trust import gpu_name, is_promise
from flashmoe_science.judge.verdicts import is_brought
from flashmoe_science.records import NoteRow, RefusalRow
from flashmoe_science.store import Run

_REFUSALS = columns("k:kernel", "words:reason", "stage", "mono:where")


def refusals(contents: Contents) -> Iterator[Block]:
    """The numbers that the standing runs did not give, and why: those on record, then those refused by verdicts alone. Equal
    ones on several problems are one row."""
    merged: dict[tuple[str | None, str, str, str, str], list[str]] = defaultdict(list)
    recorded: set[tuple[str, str, str | None]] = set()
    standing, gpus = {row.run for row in contents.verdicts}, {row.gpu for row in contents.verdicts}
    for run in contents.runs:
        gpu = gpu_name(run.header.environment)
        if run.header.run not in standing and gpu in gpus:
            continue  # an older run, which another replaced
        for row in run.rows:
            if isinstance(row, RefusalRow) and not is_promise(row):
                merged[row.kernel, row.config or "", row.stage, row.reason, gpu].append(row.problem or "every problem")
                recorded.add((run.header.run, row.problem or "", row.kernel))
    for verdict in contents.verdicts:
        if verdict.verdict == "refused" and (verdict.run, verdict.problem, verdict.kernel) not in recorded:
            merged[verdict.kernel, verdict.config, "judged", verdict.reason or "", verdict.gpu].append(verdict.problem)
    if not merged:
        yield Paragraph("None: every number that was asked for was given.")
        return
    rows = []
    for (kernel, config, stage, reason, gpu), found in merged.items():
        problems = list(dict.fromkeys(found))
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        where = Cell("; ".join(problems[:3]) + more, gpu)
        cells = (Cell(kernel or "the whole problem", config or None), Cell(reason, state="refused"), Cell(stage), where)
        rows.append(Row(cells, "candidate" if kernel and is_brought(kernel, None) else ""))
    # The kernels that the report is about come first.
    rows.sort(key=lambda row: (row.origin == "candidate") != contents.of_candidates)
    yield Table("refusals", "Refusals", _REFUSALS, rows)


def runs(contents: Contents) -> Iterator[Block]:
    """What the runs took in all, then each, the latest first."""
    if contents.runs:
        yield Paragraph(f"{cost_line(contents.runs)}.")
    standing = {row.run for row in contents.verdicts}
    for run in contents.runs:
        yield from _run(run, run.header.run in standing)


def _run(run: Run, standing: bool) -> Iterator[Block]:
    """Where, when and with what a run was made, and how to repeat it."""
    header, where = run.header, run.header.environment
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
        ("took", cost_line([run]), ""),
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
