"""``flashmoe compare``: commits, runs or kernels side by side."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashmoe_science.cli.evidence import DEFAULT, chosen, runs_under

if TYPE_CHECKING:
    from rich.console import Console

    from flashmoe_science.judge.compare import Cell, SideBySide, Summary
    from flashmoe_science.judge.selectors import Version
    from flashmoe_science.judge.standing import JudgedRun
    from flashmoe_science.judge.stats import Interval
    from flashmoe_science.records import Cache, Clock
    from flashmoe_science.store import Run

_PIPED_WIDTH = 160  # room for the resources
_COLOURS = {"faster": "green", "slower": "red", "equivalent": "cyan", "undecided": "yellow", None: ""}


def compare(
    versions: Annotated[list[str], typer.Argument(metavar="VERSION", help="First what the others are compared with.")],
    suite: Annotated[str | None, typer.Option("--suite", help="Only runs of this suite.")] = None,
    problem: Annotated[str | None, typer.Option("--problem", help="Only this problem, as text.")] = None,
    evidence: Annotated[Path, typer.Option("--evidence", help="Folder with run records.")] = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print every cell as JSON.")] = False,
) -> None:
    """Put versions side by side: time, speed-up over the first and over sdpa with intervals, correctness, resources.

    A version is a commit or a run (the beginning of its id is enough), a file or folder of records, a kernel by name, or a
    kernel in one of these, as RUN:KERNEL. Without a kernel, the fastest of what was on trial speaks for each problem.

    Each ratio says how it was taken: "paired", sampled side by side in one run; "through NAME", each beside the same rival, so
    that the machine's state cancels; or "unpaired", where only the samples' own spread is in the interval. Times on different
    GPUs, problems, clocks or caches are not compared.

    \b
    Examples:
      flashmoe compare fwd_triton fwd_gluon_sm90
      flashmoe compare 1a2b3c4 5d6e7f8 --suite documents
      flashmoe compare v1.py:forward v2.py:forward v3.py:forward --evidence reports/20260102-030405
      flashmoe compare 20261120T2113 reports/20260102-030405/run-documents.jsonl --json
    """
    from flashmoe_science.judge.compare import compare as side_by_side
    from flashmoe_science.operations import parse_problem

    wanted = None if problem is None else str(parse_problem(problem))
    if evidence.is_dir() and not any(map(_path, versions)):  # a file may be of a suite of its own
        _, suite = chosen(evidence, suite=suite)
    # A judged run is one object, so that what was sampled side by side is seen to be.
    judged: dict[str, JudgedRun] = {}

    def known(runs: Sequence[Run]) -> list[JudgedRun]:
        return [_judged(judged, run) for run in runs if suite in (None, run.header.suite)]

    on_record = known(runs_under(evidence)) if evidence.is_dir() or not all(_path(word) for word in versions) else []
    if suite is not None and not on_record and evidence.is_dir() and not any(_path(word) for word in versions):
        raise ValueError(f"--suite is {suite!r}, of which there is no record under {evidence}")
    found = side_by_side([_version(word, on_record, known) for word in versions], wanted)
    if as_json:
        typer.echo(json.dumps(_as_dict(found), indent=1))
        return
    _print(found)


def _judged(known: dict[str, JudgedRun], run: Run) -> JudgedRun:
    """Those of the run, made once. Raises ValueError where another file says something else under the same id."""
    from flashmoe_science.judge.standing import JudgedRun

    found = known.setdefault(run.header.run, JudgedRun(run))
    if (found.run.header, found.run.rows) != (run.header, run.rows):
        raise ValueError(f"{run.path} and {found.run.path} differ, and both say that they are run {run.header.run!r}")
    return found


def _version(word: str, on_record: Sequence[JudgedRun], known: Callable[[Sequence[Run]], list[JudgedRun]]) -> Version:
    from flashmoe_science.judge.selectors import Version, of_kernel, version
    from flashmoe_science.store import read_run, refuse_torn

    path = _path(word)
    if path is None:
        return version(word, on_record)
    runs = known(runs_under(path) if path.is_dir() else refuse_torn([read_run(path)]))
    kernel = word[len(str(path)) + 1 :]
    return of_kernel(word, runs, kernel) if kernel else Version(word, tuple(runs))


def _path(word: str) -> Path | None:
    """The file or folder of records that a word names, with or without ":KERNEL" after it; None where it names none."""
    parts = word.split(":")
    for count in range(len(parts), 0, -1):
        name = ":".join(parts[:count])
        path = Path(name)
        try:
            if name and (path.is_dir() or (path.is_file() and path.suffix == ".jsonl")):
                return path
        except OSError:  # such as a word that is too long for a name
            continue
    return None


def _as_dict(found: SideBySide) -> dict[str, Any]:
    return {
        "versions": list(found.labels),
        "rows": [
            {
                "gpu": gpu,
                "problem": problem,
                "clock": clock,
                "cache": cache,
                "cells": {label: _cell_dict(cell) for label, cell in zip(found.labels, cells, strict=True)},
            }
            for (gpu, problem, clock, cache), cells in found.rows.items()
        ],
        "summaries": [
            {
                "version": one.label,
                "gpu": one.gpu,
                "clock": one.clock,
                "cache": one.cache,
                "mean": _interval_dict(one.mean),
                "rows": one.told.rows,
                "faster_after_holm": len(one.told.above),
                "slower_after_holm": len(one.told.below),
                "unpaired": one.unpaired,
            }
            for one in found.summaries
        ],
        "alone": dict(found.alone),
    }


def _cell_dict(cell: Cell) -> dict[str, Any] | None:
    if cell.verdict is None:
        return None
    launch, oracle = cell.largest, cell.oracle
    return {
        "run": cell.verdict.run,
        "commit": cell.verdict.commit,
        "kernel": cell.verdict.kernel,
        "config": cell.verdict.config,
        "time_ns": cell.verdict.time_ns,
        "tflops": cell.verdict.tflops,
        "correct": oracle and oracle.passed,
        "error": oracle and oracle.out.max,
        "allowed": oracle and oracle.out.bound_max,
        "refused": cell.verdict.reason if cell.verdict.verdict == "refused" else None,
        "over_first": _interval_dict(cell.over_first),
        "how": cell.how,
        "said": cell.said,
        "over_sdpa": _interval_dict(cell.over_sdpa),
        "launches": len(cell.launches) or None,
        "threads": launch and math.prod(launch.block),
        "registers": launch and launch.registers,
        "shared_bytes": launch and launch.shared_bytes,
        "peak_extra_bytes": cell.verdict.peak_extra_bytes,
    }


def _interval_dict(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else {"ratio": interval.ratio, "low": interval.low, "high": interval.high}


def _print(found: SideBySide) -> None:
    from flashmoe_science.cli.sheet import console, put_wrapped

    out = console(_PIPED_WIDTH)
    groups: dict[tuple[str, Clock, Cache], list[tuple[str, tuple[Cell, ...]]]] = defaultdict(list)
    for (gpu, problem, clock, cache), cells in found.rows.items():
        groups[gpu, clock, cache].append((problem, cells))
    for (gpu, clock, cache), rows in groups.items():
        _print_group(out, f"{gpu}, {clock} clock, {cache} cache", found.labels, rows)
        here = [one for one in found.summaries if (one.gpu, one.clock, one.cache) == (gpu, clock, cache)]
        for one in here:
            put_wrapped(out, _in_words(one, found.labels[0]))
        out.print()
    for label, count in found.alone.items():
        if count:
            rows_are = "1 row is" if count == 1 else f"{count} rows are"
            put_wrapped(out, f"{rows_are} only {label}'s: there is nothing to compare with")


def _print_group(out: Console, title: str, labels: Sequence[str], rows: Sequence[tuple[str, tuple[Cell, ...]]]) -> None:
    from flashmoe_science.cli.sheet import Column, Line, print_sheet

    columns = (
        Column("version"), Column("us", right=True), Column("over the first"), Column(""), Column("over sdpa", spare=2),
        Column("correct (error)", spare=1), Column("threads", right=True, spare=5), Column("regs", right=True, spare=4),
        Column("shared KiB", right=True, spare=3),
    )  # fmt: skip
    lines = [
        Line(problem, (label, *(text for text, _ in cells)), ("", *(style for _, style in cells)), below=_refusal(cell))
        for problem, of_versions in rows
        for label, cell in zip(labels, of_versions, strict=True)
        for cells in (_cells(cell),)
    ]
    print_sheet(out, title, "problem", columns, lines)


def _refusal(cell: Cell) -> str | None:
    refused = cell.verdict is not None and cell.verdict.verdict == "refused"
    return f"refused: {cell.verdict.reason}" if refused and cell.verdict else None


def _cells(cell: Cell) -> list[tuple[str, str]]:
    """(text, colour) of the columns after the version's name."""
    if cell.verdict is None:
        return [("-", "")] + [("", "")] * 7
    time, launch, oracle = cell.verdict.time_ns, cell.largest, cell.oracle
    told = " ".join(filter(None, (cell.said, f"({cell.how})" if cell.how else "")))
    correct = "?" if oracle is None else "yes" if oracle.passed else "WRONG"
    if oracle is not None and oracle.out.max is not None:
        correct += f" ({oracle.out.max:.1e})"
    return [
        ("-" if time is None else f"{time / 1e3:.2f}", ""),
        (_ratio(cell.over_first), _COLOURS[cell.said]),
        (told, _COLOURS[cell.said]),
        (_ratio(cell.over_sdpa), ""),
        (correct, "red" if oracle is not None and not oracle.passed else ""),
        ("" if launch is None else str(math.prod(launch.block)), ""),
        ("" if launch is None or launch.registers is None else str(launch.registers), ""),
        ("" if launch is None else f"{launch.shared_bytes / 1024:.1f}", ""),
    ]


def _ratio(interval: Interval | None) -> str:
    from flashmoe_science.judge.formats import ratio

    return "" if interval is None else f"{ratio(interval.ratio)}x [{ratio(interval.low)}, {ratio(interval.high)}]"


def _in_words(one: Summary, first: str) -> str:
    told = one.told
    words = f"{one.label}: {_ratio(one.mean)} the speed of {first} by geometric mean"
    if told.rows > 1:
        words += f"; of {told.rows} rows {len(told.above)} are better and {len(told.below)} worse"
        words += ", corrected for their number (Holm)"
    return words + (f"; {one.unpaired} are unpaired" if one.unpaired else "")
