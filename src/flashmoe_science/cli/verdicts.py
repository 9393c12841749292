"""``flashmoe verdicts``: what the records say, judged anew whenever they change."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as Grid

from flashmoe_science.cli.evidence import DEFAULT, Evidence
from flashmoe_science.cli.judged import standing_under
from flashmoe_science.cli.sheet import Rows, console, fits_a_screen, print_table, print_wrapped
from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.judge.formats import count, times
from flashmoe_science.judge.report.tables import titles_of, verdict_table
from flashmoe_science.judge.summary import Group, disagreements, groups, of_suites
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import Clock

_SIDE_BY_SIDE = 2  # GPUs, in 80 columns
_RATIO = "ratio: the rival's time over the kernel's, with its 95% interval; above 1 the kernel is faster"
_SUMMARY = (
    "graph: problems by device time, faster/equivalent/slower/no verdict, of our fastest kernel (or yours) on each. mean, "
    "least: of the best rival's time over the kernel's, the mean geometric; above 1 the kernel is faster. eager: the mean of "
    "end-to-end latency"
)


def verdicts(
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only this GPU's, such as h200; cpu for runs without one.")] = None,
    suite: Annotated[str | None, typer.Option("--suite", help="Only this suite's, such as documents or long.")] = None,
    evidence: Evidence = DEFAULT,
    rows: Rows = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects, one a verdict.")] = False,
) -> int:
    """Print what the records say: which kernel is faster than which, by how much and with what certainty.

    The summary has a line for each suite. A few verdicts, or all with --rows, are printed one by one. A verdict is about one
    kernel on one problem. Its ratio is the rival's time over the kernel's, with a 95% interval: above 1 the kernel is faster.
    The rival of our kernels is the best peer on that problem; the rival of a peer is our best kernel. A refused row has no
    number and gives the reason. Verdicts are computed from the records, again whenever a record or the program has changed.

    Exit code: 0 there are verdicts, 2 it could not run, 3 there are none.

    \b
    Examples:
      flashmoe verdicts
      flashmoe verdicts --gpu h200 --suite long --rows
      flashmoe verdicts --json --evidence reports/20260102-030405
    """
    found = standing_under(evidence, gpu, suite)
    code = ExitCode.GOOD if found.verdicts else ExitCode.NO_NUMBER
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in found.verdicts], indent=1))
        return code
    out = console()
    if not found.verdicts:
        chosen = ", ".join(filter(None, (gpu, suite)))
        what = f"{'verdicts' if found.runs else 'records'}{chosen and f' of {chosen}'}"
        out.print(f"{code.word}: no {what} under {evidence}; flashmoe prove makes some", markup=False, soft_wrap=True)
    elif print_verdicts(out, found.verdicts, rows):
        out.print()
    else:
        print_wrapped(out, f"{count(len(found.verdicts), 'verdict')}; one by one: flashmoe verdicts --rows (--suite NAME)")
    return code


def print_verdicts(out: Console, verdicts: Sequence[Verdict], rows: bool = False) -> bool:
    """The verdicts in groups of the same conditions, one by one where ``rows`` or where they fit a screen, else summarised.
    Returns whether they were printed one by one."""
    found = groups(verdicts)
    one_by_one = rows or fits_a_screen(len(verdicts))
    if one_by_one:
        titles = titles_of(found)
        for group in found:
            print_table(out, verdict_table(titles[group.anchor], group.rows))
            if len(group.measured) > 1:
                print_wrapped(out, group.corrected)
            out.print()
        for sentence in disagreements(row for row in verdicts if row.origin != "peer"):
            print_wrapped(out, sentence)
        if any(row.ratio is not None for row in verdicts):
            print_wrapped(out, _RATIO)
    elif found:
        _print_summary(out, found)
    return one_by_one


def _print_summary(out: Console, found: Sequence[Group]) -> None:
    """A line a suite and cache, two GPUs side by side; then where ours, or yours, lose most."""
    every = sorted({group.gpu for group in found})
    for gpus in (every[at : at + _SIDE_BY_SIDE] for at in range(0, len(every), _SIDE_BY_SIDE)):
        by_suite: dict[tuple[tuple[str, ...], str, str], dict[tuple[str, Clock], Group]] = defaultdict(dict)
        for group in sorted(found, key=lambda one: (bool(one.tried), one.suite)):
            if group.gpu in gpus:
                by_suite[group.tried, group.suite, group.cache][group.gpu, group.clock] = group
        grid = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        grid.add_column("\nsuite", overflow="fold", min_width=19)
        for gpu in gpus:
            for heading in (f"{gpu}\ngraph", "\nmean", "\nleast", "\neager"):
                grid.add_column(heading, justify="right", no_wrap=True)
        for (tried, suite, cache), one in by_suite.items():
            name = "\n".join(kernel.rpartition("/")[2] for kernel in tried) or suite
            cells = [cell for gpu in gpus for cell in _cells(one.get((gpu, "graph")), one.get((gpu, "eager")))]
            grid.add_row(f"{name}{' warm' * (cache == 'warm')}", *cells)
        out.print(grid)
    ours = of_suites([row for group in found if not group.tried and group.clock == "graph" for row in group.measured])
    lost = [row for row in ours if row.verdict == "slower"]
    if lost:
        worst = min(lost, key=lambda row: row.ratio or 0.0)
        where = f"{times(worst.ratio)} of {worst.rival}: {worst.problem}"
        print_wrapped(
            out, f"slower than the best rival by device time: {len(lost)} of {len(ours)} problems; the worst, {where}"
        )
    print_wrapped(out, _SUMMARY)


def _cells(graph: Group | None, eager: Group | None) -> tuple[str, str, str, str]:
    as_a_caller_waits = times(eager.mean.ratio) if eager and eager.mean else ""
    if graph is None:
        return "", "", "", as_a_caller_waits
    counts, least = graph.counts, graph.measured[0].ratio if graph.measured else None
    totals = (counts["faster"], counts["equivalent"], counts["slower"], counts["undecided"] + counts["refused"])
    return "/".join(map(str, totals)), times(graph.mean.ratio) if graph.mean else "", times(least), as_a_caller_waits
