"""``flashmoe report``: the records as a page to read, a table to paste and a sheet to load."""

from __future__ import annotations

from typing import Annotated

import typer

from flashmoe_science.cli.evidence import CLAIMS, DEFAULT, Evidence, judged_under
from flashmoe_science.judge.gate.claims import read_claims
from flashmoe_science.judge.report.write import write_report


def report(
    evidence: Evidence = DEFAULT,
    out: Annotated[str, typer.Option("--out", help="Folder for report.html, .md and .csv.")] = "reports/evidence",
) -> None:
    """Write what the records say as one HTML page that needs no network, as Markdown and as CSV.

    The page opens with what won and lost, of the project's own kernels or of a run of yours. Below, folded, are the verdicts,
    claims, ratios with intervals, speed against length, rooflines, causes with the changes that they call for, controls, time
    and cost, and the machine and command of every run. Everything is judged again from the records.

    \b
    Examples:
      flashmoe report
      flashmoe report --evidence reports/20260102-030405 --out pages
    """
    if not out.strip():
        raise ValueError("--out is empty; it must name the folder for the report")
    claims = read_claims(evidence / CLAIMS) if (evidence / CLAIMS).is_file() else []
    for path in write_report(judged_under(evidence), out, claims=claims):
        typer.echo(path)
