"""``flashmoe report``: the records as a page to read, a table to paste and a sheet to load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashmoe_science.cli.evidence import DEFAULT, claims_under, runs_under


def report(
    evidence: Annotated[Path, typer.Option("--evidence", help="Folder with run records.")] = DEFAULT,
    out: Annotated[Path, typer.Option("--out", help="Folder for report.html, .md, .csv and .jsonl.")] = Path(
        "reports/evidence"
    ),
    price: Annotated[
        float | None,
        typer.Option("--price", metavar="USD_PER_HOUR", help="Of the machine, for every run (each run's own)."),
    ] = None,
) -> None:
    """Write what the records say as one HTML page that needs no network, as Markdown, as CSV and as JSON lines.

    The page holds the verdicts, kernels on trial, claims, ratios with intervals, speed against length, rooflines, diagnoses,
    controls, refusals, cost, and the machine and command of every run. Everything is judged anew from the records.

    \b
    Examples:
      flashmoe report
      flashmoe report --evidence reports/20260102-030405 --out pages --price 3.50
    """
    from flashmoe_science.cli.budget import price_or_default
    from flashmoe_science.judge.cost import at_price
    from flashmoe_science.judge.report import write_report
    from flashmoe_science.judge.standing import verdicts

    runs = at_price(runs_under(evidence), price_or_default(price), every=price is not None)
    if not runs:
        raise ValueError(f"--evidence is {str(evidence)!r}, which holds no records (*.jsonl); run flashmoe prove to make some")
    for path in write_report(runs, out, claims=claims_under(evidence, verdicts(runs), runs)):
        typer.echo(path)
