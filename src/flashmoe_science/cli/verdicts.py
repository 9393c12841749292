"""``flashmoe verdicts``: what the records say, judged anew each time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashmoe_science.cli.evidence import DEFAULT, claims_under, runs_under

if TYPE_CHECKING:
    from rich.console import Console

    from flashmoe_science.judge.claims import ClaimResult
    from flashmoe_science.judge.verdict import Verdict

_COLOURS = {"faster": "green", "slower": "red", "equivalent": "cyan", "undecided": "yellow", "refused": "magenta"}
_CLAIM_COLOURS = {"holds": "green", "fails": "red", "no record": "yellow"}
_PIPED_WIDTH = 200  # a table that does not go to a terminal is not folded to one's width


def verdicts(
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only this GPU's, such as h200; cpu for runs without one.")] = None,
    suite: Annotated[str | None, typer.Option("--suite", help="Only this suite's, such as documents or long.")] = None,
    evidence: Annotated[Path, typer.Option("--evidence", help="Folder with run records.")] = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects, one a verdict.")] = False,
) -> None:
    """Print what the records say: which kernel is faster than which, by how much and with what certainty.

    Each row is one kernel on one problem. The ratio is the rival's time over the kernel's, so that above 1 the kernel is
    faster, with its 95% interval. For our kernels the rival is the best peer of that problem; for a peer it is our best kernel.
    A refused row has no number, and says why. Nothing is stored: verdicts and claims are computed from the records each time.

    \b
    Examples:
      flashmoe verdicts
      flashmoe verdicts --gpu h200 --suite long
      flashmoe verdicts --json --evidence reports/20260102-030405
    """
    from flashmoe_science.judge.verdicts import verdicts as judge

    runs = runs_under(evidence)
    everything = judge(runs)
    rows = _selected(everything, gpu, suite)
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows], indent=1))
        return
    claims = claims_under(evidence, everything, runs) if gpu is None and suite is None else []
    _print(rows, claims, "No records" if not everything else "No verdicts for that choice", evidence)


def _selected(rows: Sequence[Verdict], gpu: str | None, suite: str | None) -> list[Verdict]:
    """The rows asked for. Raises ValueError for a GPU or a suite that neither the records nor this package know."""
    if gpu is not None and gpu not in {row.gpu for row in rows} | {"cpu"}:
        from flashmoe_science.hardware.gpus import gpu_named

        gpu = gpu_named(gpu).name
    if suite is not None:
        from flashmoe_science.measure.suites import SUITES

        known = dict.fromkeys([*SUITES, *(row.suite for row in rows)])
        if suite not in known:
            raise ValueError(f"suite is {suite!r}; it must be one of {', '.join(known)}")
    return [row for row in rows if gpu in (None, row.gpu) and suite in (None, row.suite)]


def _print(rows: Sequence[Verdict], claims: Sequence[ClaimResult], nothing: str, evidence: Path) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    if not rows:
        console.print(f"{nothing} under {evidence}.", markup=False)
    groups: dict[tuple[str, str, str, str], list[Verdict]] = defaultdict(list)
    for row in rows:
        groups[row.gpu, row.suite, row.clock, row.cache].append(row)
    for (gpu, suite, clock, cache), group in groups.items():
        _print_group(console, f"{suite} on {gpu}, {clock} clock, {cache} cache", group)
    if claims:
        _print_claims(console, claims)


def _print_group(console: Console, title: str, rows: Sequence[Verdict]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading, justify in (
        ("problem", "left"), ("kernel", "left"), ("us", "right"), ("TFLOP/s", "right"), ("rival", "left"),
        ("ratio", "right"), ("95% interval", "left"), ("verdict", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]  # the two are words that rich knows
    before = None
    for row in rows:
        told = f"{row.verdict}: {row.reason}" if row.verdict in ("undecided", "refused") else row.verdict
        table.add_row(
            Text(row.problem if row.problem != before else ""),
            Text(row.kernel, style="bold" if row.origin == "ours" else ""),
            "" if row.time_ns is None else f"{row.time_ns / 1e3:.2f}",
            "" if row.tflops is None else f"{row.tflops:.3g}",
            Text(row.rival or ""),
            "" if row.ratio is None else f"{row.ratio:.3f}",
            Text("" if row.low is None else f"{row.low:.3f} to {row.high:.3f}"),
            Text(told, style=_COLOURS[row.verdict]),
        )
        before = row.problem
    console.print(table)
    if len(rows) > 1:
        from flashmoe_science.judge.summary import groups

        console.print(groups(rows)[0].corrected, markup=False)
    console.print()


def _print_claims(console: Console, claims: Sequence[ClaimResult]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="claims", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in ("claim", "asks", "measured", "95% interval", "outcome"):
        table.add_column(heading)
    for result in claims:
        told = result.outcome if result.why is None else f"{result.outcome}: {result.why}"
        table.add_row(
            Text(f"{result.claim.text} ({result.claim.suite}, {result.claim.gpu})"),
            Text(f"{result.claim.statistic} {result.claim.demand}"),
            "" if result.measured is None else f"{result.measured:.3f}",
            "" if result.low is None else f"{result.low:.3f} to {result.high:.3f}",
            Text(told, style=_CLAIM_COLOURS[result.outcome]),
        )
    console.print(table)
