"""``flashmoe verdicts``: what the records say, judged anew each time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from flashmoe_science.cli.evidence import DEFAULT, Evidence, judged_of
from flashmoe_science.cli.sheet import console, print_table, put_wrapped
from flashmoe_science.judge.report.tables import titles_of, verdict_table
from flashmoe_science.judge.standing import standing
from flashmoe_science.judge.summary import disagreements, groups
from flashmoe_science.judge.verdicts import Verdict


def verdicts(
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only this GPU's, such as h200; cpu for runs without one.")] = None,
    suite: Annotated[str | None, typer.Option("--suite", help="Only this suite's, such as documents or long.")] = None,
    evidence: Evidence = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects, one a verdict.")] = False,
) -> None:
    """Print what the records say: which kernel is faster than which, by how much and with what certainty.

    Each row is one kernel on one problem. The ratio is the rival's time over the kernel's, so that above 1 the kernel is
    faster, with its 95% interval. For our kernels the rival is the best peer of that problem; for a peer it is our best kernel.
    A refused row has no number, and says why. Nothing is stored: verdicts are computed from the records each time.

    \b
    Examples:
      flashmoe verdicts
      flashmoe verdicts --gpu h200 --suite long
      flashmoe verdicts --json --evidence reports/20260102-030405
    """
    judged = judged_of(evidence, gpu, suite)
    rows = standing(judged)
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows], indent=1))
        return
    out = console()
    if not rows:
        out.print(f"No {'verdicts' if judged else 'records'} under {evidence}.", markup=False, soft_wrap=True)
    print_verdicts(out, rows)


def print_verdicts(out: Console, rows: Sequence[Verdict]) -> None:
    """The verdicts in groups of the same conditions, each with its reason where it has one."""
    found = groups(rows)
    titles = titles_of(found)
    for group in found:
        print_table(out, verdict_table(titles[group.anchor], group.rows))
        if len(group.measured) > 1:
            put_wrapped(out, group.corrected)
        out.print()
    for sentence in disagreements(row for row in rows if row.origin != "peer"):
        put_wrapped(out, sentence)
    if any(row.ratio is not None for row in rows):
        put_wrapped(out, "ratio: the rival's time over the kernel's, with its 95% interval; above 1 the kernel is faster")
        out.print()
