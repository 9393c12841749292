"""``flashmoe compare``: commits, runs or kernels side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from flashmoe_science.cli.evidence import DEFAULT, Evidence, suite_named
from flashmoe_science.cli.judged import Cached, cached
from flashmoe_science.cli.sheet import Rows, console, fits_a_screen, print_table, print_wrapped
from flashmoe_science.judge import compare as versions_of
from flashmoe_science.judge.formats import count, microseconds, times, with_interval
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.report.blocks import Cell, Row, Table, columns
from flashmoe_science.judge.standing import JudgedRun

_PIPED_WIDTH = 160  # room for the resources
_COLUMNS = columns("problem", "k:version", "n:us", "over the first", "", "over sdpa", "correct (error)",
                   "n:threads", "n:regs", "n:shared KiB")  # fmt: skip
_TOTALS = columns("where", "k:version", "n:n", "n:counts", "nw:mean", "n:least", "n:most")


def compare(
    versions: Annotated[list[str], typer.Argument(metavar="VERSION", help="Versions; the others are compared with the first.")],
    suite: Annotated[str | None, typer.Option("--suite", help="Only runs of this suite.")] = None,
    evidence: Evidence = DEFAULT,
    rows: Rows = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every cell as JSON.")] = False,
) -> None:
    """Put versions side by side: time, speed-up over the first and over sdpa with intervals, correctness, resources.

    The summary has a line for each GPU, clock and version. A few problems, or all with --rows, are printed one by one.

    A version is a commit or a run (the beginning of its id is enough), a kernel by name, or a kernel in one of these, as
    RUN:KERNEL. Without a kernel, the fastest kernel on trial counts for each problem.

    Each ratio says how it was taken: "paired" (sampled side by side in one run) or "through NAME" (each paired with the same
    rival, so that the machine's state cancels). Otherwise there is no ratio. Times on different GPUs, problems, clocks or
    caches are not compared.

    \b
    Examples:
      flashmoe compare fwd_triton fwd_gluon_sm90
      flashmoe compare 1a2b3c4 5d6e7f8 --suite documents
      flashmoe compare v1.py:forward v2.py:forward --evidence reports/mine
      flashmoe compare 20261120T2113 20261121T1833:fwd_triton --json
    """

    def judged(runs: Sequence[JudgedRun]) -> Cached:
        of = suite_named(suite, [one.run.header.suite for one in runs], evidence)
        found = versions_of.compare(versions, [one for one in runs if of in (None, one.run.header.suite)])
        cells = [(place._asdict() | {"cells": [cell and cell.as_dict() for cell in row]}) for place, row in found.items()]
        totals = {
            title: [one._asdict() | {"mean": one.mean and one.mean.ends} for one in every]
            for title, every in versions_of.totals(versions, found).items()
        }
        return {"rows": cells, "totals": totals}, np.zeros(0)

    kept, _ = cached(evidence, ("compare", *versions, "of", suite or ""), judged)
    if as_json:
        shown = [row | {"cells": dict(zip(versions, row["cells"], strict=True))} for row in kept["rows"]]
        typer.echo(json.dumps({"versions": versions, "rows": shown}, indent=1))
        return
    out = console(_PIPED_WIDTH)
    if rows or fits_a_screen(len(kept["rows"]) * len(versions)):
        _print_rows(out, versions, kept["rows"])
    else:
        _print_totals(out, versions[0], kept["totals"])
        print_wrapped(out, f"{count(len(kept['rows']), 'row')}, one by one: flashmoe compare --rows (--suite NAME)")


def _print_rows(out: Console, versions: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    titled = grouped(rows, lambda row: versions_of.Place(*(row[name] for name in versions_of.Place._fields)).title)
    for title, members in titled.items():
        made = [_row(one["problem"], *each) for one in members for each in zip(versions, one["cells"], strict=True)]
        print_table(out, Table("versions", title, _COLUMNS, made))
        out.print()


def _print_totals(out: Console, first: str, totals: dict[str, list[dict[str, Any]]]) -> None:
    """A line a GPU, clock, cache and version."""
    lines = []
    for title, every in totals.items():
        for one in every:
            judged = one["counts"]
            counts = [judged.get(word, 0) for word in ("faster", "equivalent", "slower")]
            counts.append(judged.get("undecided", 0) + judged.get("no ratio", 0))
            mean = with_interval(*one["mean"].values()) if one["mean"] else ""
            figures = (str(one["places"]), "/".join(map(str, counts)), mean, times(one["least"]), times(one["most"]))
            lines.append(Row((Cell(title), Cell(one["version"]), *map(Cell, figures))))
    print_table(out, Table("totals", f"speed over {first}", _TOTALS, lines))
    print_wrapped(
        out, "Counts are faster/equivalent/slower/open; mean is the geometric mean of the ratios, with its 95% interval."
    )


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
