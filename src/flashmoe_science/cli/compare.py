"""``flashmoe compare``: commits, runs or kernels side by side."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Annotated, Any

import typer

from flashmoe_science.cli.evidence import DEFAULT, Evidence, judged_of
from flashmoe_science.cli.sheet import console, print_table
from flashmoe_science.judge import compare as versions_of
from flashmoe_science.judge.formats import microseconds, with_interval
from flashmoe_science.judge.report.blocks import Cell, Row, Table, columns

_PIPED_WIDTH = 160  # room for the resources
_COLUMNS = columns("problem", "k:version", "n:us", "over the first", "", "over sdpa", "correct (error)",
                   "n:threads", "n:regs", "n:shared KiB")  # fmt: skip


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
    rows = [(place, [None if cell is None else cell.as_dict() for cell in cells]) for place, cells in found.items()]
    if as_json:
        told = [place._asdict() | {"cells": dict(zip(versions, cells, strict=True))} for place, cells in rows]
        typer.echo(json.dumps({"versions": versions, "rows": told}, indent=1))
        return
    out = console(_PIPED_WIDTH)
    tables: dict[str, list[Row]] = defaultdict(list)
    for place, cells in rows:
        title = f"{place.gpu}, {place.clock} clock, {place.cache} cache"
        tables[title] += [_row(place.problem, version, cell) for version, cell in zip(versions, cells, strict=True)]
    for title, members in tables.items():
        print_table(out, Table("versions", title, _COLUMNS, members))
        out.print()


def _row(problem: str, version: str, of: dict[str, Any] | None) -> Row:
    if of is None:
        return Row((Cell(problem), Cell(version), Cell("-"), *[Cell()] * 7))
    correct = {None: "?", True: "yes", False: "WRONG"}[of["correct"]]
    shared = "" if of["shared_bytes"] is None else f"{of['shared_bytes'] / 1024:.1f}"
    cells = (
        Cell(problem),
        Cell(version),
        Cell(microseconds(of["time_ns"]) or "-", of["refused"] and f"refused: {of['refused']}"),
        Cell(with_interval(*of["over_first"].values()) if of["over_first"] else "", state=of["said"]),
        Cell(" ".join(filter(None, (of["said"], of["how"] and f"({of['how']})"))), state=of["said"]),
        Cell(with_interval(*of["over_sdpa"].values()) if of["over_sdpa"] else ""),
        Cell(
            correct if of["error"] is None else f"{correct} ({of['error']:.1e})", state="fails" if correct == "WRONG" else None
        ),
        *map(Cell, (str(of["threads"] or ""), str(of["registers"] or ""), shared)),
    )
    return Row(cells)
