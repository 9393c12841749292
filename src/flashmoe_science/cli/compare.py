"""``flashmoe compare``: commits, runs or kernels side by side."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from flashmoe_science.cli.evidence import DEFAULT, Evidence, judged_of
from flashmoe_science.cli.sheet import console, print_table
from flashmoe_science.judge import compare as versions_of
from flashmoe_science.judge.compare import Place
from flashmoe_science.judge.formats import microseconds, with_interval
from flashmoe_science.judge.report.blocks import Cell, Row, Table, columns
from flashmoe_science.judge.stats import Interval

_PIPED_WIDTH = 160  # room for the resources
_COLUMNS = columns("problem", "k:version", "n:us", "over the first", "", "over sdpa", "correct (error)",
                   "n:threads", "n:regs", "n:shared KiB")  # fmt: skip
_Found = dict[Place, list[versions_of.Cell | None]]


def compare(
    versions: Annotated[list[str], typer.Argument(metavar="VERSION", help="First what the others are compared with.")],
    suite: Annotated[str | None, typer.Option("--suite", help="Only runs of this suite.")] = None,
    evidence: Evidence = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print every cell as JSON.")] = False,
) -> None:
    """Put versions side by side: time, speed-up over the first and over sdpa with intervals, correctness, resources.

    A version is a commit or a run (the beginning of its id is enough), a kernel by name, or a kernel in one of these, as
    RUN:KERNEL. Without a kernel, the fastest of what was on trial speaks for each problem.

    Each ratio says how it was taken: "paired", sampled side by side in one run; or "through NAME", each beside the same rival,
    so that the machine's state cancels. Where there is neither, there is no ratio. Times on different GPUs, problems, clocks or
    caches are not compared.

    \b
    Examples:
      flashmoe compare fwd_triton fwd_gluon_sm90
      flashmoe compare 1a2b3c4 5d6e7f8 --suite documents
      flashmoe compare v1.py:forward v2.py:forward v3.py:forward --evidence reports/20260102-030405
      flashmoe compare 20261120T2113 20261121T1833:fwd_triton --json
    """
    found = versions_of.compare(versions, judged_of(evidence, suite=suite))
    if as_json:
        rows = [
            place._asdict() | {"cells": {word: cell and _cell_dict(cell) for word, cell in zip(versions, cells, strict=True)}}
            for place, cells in found.items()
        ]
        typer.echo(json.dumps({"versions": versions, "rows": rows}, indent=1))
    else:
        _print(versions, found)


def _cell_dict(cell: versions_of.Cell) -> dict[str, Any]:
    row, launch, oracle = cell.verdict, cell.largest, cell.oracle
    own = ("run", "commit", "kernel", "config", "time_ns", "tflops", "peak_extra_bytes")
    return {name: getattr(row, name) for name in own} | {
        "correct": oracle and oracle.passed,
        "error": oracle and oracle.out.max,
        "allowed": oracle and oracle.out.bound_max,
        "refused": row.reason if row.verdict == "refused" else None,
        "over_first": _interval_dict(cell.over_first),
        "how": cell.how,
        "said": cell.said,
        "over_sdpa": _interval_dict(cell.over_sdpa),
        "threads": launch and math.prod(launch.block),
        "registers": launch and launch.registers,
        "shared_bytes": launch and launch.shared_bytes,
    }


def _interval_dict(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else {name: getattr(interval, name) for name in ("ratio", "low", "high")}


def _print(versions: Sequence[str], found: _Found) -> None:
    out = console(_PIPED_WIDTH)
    tables: dict[str, list[Row]] = defaultdict(list)
    for (gpu, problem, clock, cache), cells in found.items():
        tables[f"{gpu}, {clock} clock, {cache} cache"] += [
            _row(problem, word, cell) for word, cell in zip(versions, cells, strict=True)
        ]
    for title, rows in tables.items():
        print_table(out, Table("versions", title, _COLUMNS, rows))
        out.print()


def _row(problem: str, version: str, of: versions_of.Cell | None) -> Row:
    if of is None:
        return Row((Cell(problem), Cell(version), Cell("-"), *[Cell()] * 7))
    row, launch, oracle = of.verdict, of.largest, of.oracle
    correct = "?" if oracle is None else "yes" if oracle.passed else "WRONG"
    error = "" if oracle is None or oracle.out.max is None else f" ({oracle.out.max:.1e})"
    resources = ["", "", ""]
    if launch is not None:
        resources = [str(math.prod(launch.block)), str(launch.registers or ""), f"{launch.shared_bytes / 1024:.1f}"]
    cells = (
        Cell(problem),
        Cell(version),
        Cell(microseconds(row.time_ns) or "-", f"refused: {row.reason}" if row.verdict == "refused" else None),
        Cell(_ratio(of.over_first), state=of.said),
        Cell(" ".join(filter(None, (of.said, of.how and f"({of.how})"))), state=of.said),
        Cell(_ratio(of.over_sdpa)),
        Cell(correct + error, state="fails" if correct == "WRONG" else None),
        *map(Cell, resources),
    )
    return Row(cells)


def _ratio(interval: Interval | None) -> str:
    return "" if interval is None else with_interval(interval.ratio, interval.low, interval.high)
