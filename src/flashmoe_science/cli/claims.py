"""``flashmoe claims``: what was claimed, compared with what was measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from flashmoe_science.cli.evidence import CLAIMS, DEFAULT, Evidence
from flashmoe_science.cli.judged import Cached, cached
from flashmoe_science.cli.sheet import Rows, console, fits_a_screen, print_table, print_wrapped
from flashmoe_science.exit_codes import ExitCode, worst
from flashmoe_science.judge.formats import count
from flashmoe_science.judge.gate.claims import ClaimResult, judge_claim, read_claims
from flashmoe_science.judge.report.tables import claim_table
from flashmoe_science.judge.standing import JudgedRun, standing

_LINES = 4  # of a claim, with what it is about
_CODES = {"holds": ExitCode.GOOD, "fails": ExitCode.WRONG, "no record": ExitCode.NO_NUMBER}


def claims(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Claims, as TOML (EVIDENCE/claims.toml).")] = None,
    evidence: Evidence = DEFAULT,
    rows: Rows = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON.")] = False,
) -> int:
    """Compare claims with the records: each holds, fails by a stated amount, or has no record.

    A claim is a TOML table: a sentence, the problems and kernels that it is about, a statistic and its threshold.

    \b
      [[claim]]
      id = "causal-as-fast"
      text = "Causal, bf16: as fast as the best peer on every problem"
      gpu = "h200"
      suite = "long"          # or any
      clock = "graph"         # or eager
      mask = "causal"         # also op, problem, dtype, routing, head_dim,
                              # min_seqlen, max_seqlen, cache
      dtype = "bf16"
      problems = 18           # how many it is about: fewer are not enough
      statistic = "min"       # or geomean, max
      at_least = 0.98         # or at_most

    Without kernel = "NAME" the claim is about the fastest of our kernels on each problem; without rival = "NAME" about the best
    peer. quantity = "time_ns" or "memory" is about the kernel's own time or memory instead of the ratio.

    Prints the claims that do not hold (with --rows all of them), then how many hold.

    A claim holds only if the near end of the 95% interval reaches the threshold on all of its problems. Where several runs
    measured a problem, the run that is worst for the claim counts.

    Exit code: 0 all hold, 1 one fails, 2 it could not run, 3 none fails but one has no record.

    \b
    Examples:
      flashmoe claims
      flashmoe claims mine.toml --evidence reports/20260102-030405
      flashmoe claims --json
    """
    # Claims are read before the records, which take long: a missing file is reported at once.
    path = file or evidence / CLAIMS
    asked = read_claims(path)

    def judged(runs: Sequence[JudgedRun]) -> Cached:
        verdicts = standing(runs)
        return [_plain(judge_claim(claim, verdicts, runs)) for claim in asked], np.zeros(0)

    kept, _ = cached(evidence, ("claims", *(claim.model_dump_json() for claim in asked)), judged)
    results = [
        ClaimResult(claim, **values | {"runs": tuple(values["runs"])}) for claim, values in zip(asked, kept, strict=True)
    ]
    if as_json:
        asks = ({"id": one.id, "text": one.text, "asks": f"{one.statistic} {one.demand}"} for one in asked)
        typer.echo(json.dumps({"claims": [one | values for one, values in zip(asks, kept, strict=True)]}, indent=1))
    else:
        _print(results, path, rows)
    return _code(results)


def _code(results: Sequence[ClaimResult]) -> ExitCode:
    return worst(_CODES[one.outcome] for one in results) if results else ExitCode.NO_NUMBER


def _plain(one: ClaimResult) -> dict[str, Any]:
    """The fields of a result without the claim, as plain values."""
    return {field.name: getattr(one, field.name) for field in fields(one) if field.name != "claim"}


def _print(results: Sequence[ClaimResult], path: Path, rows: bool) -> None:
    """The claims that do not hold, and those that do where they fit a screen; last how many do."""
    if not results:
        typer.echo(f"{_code(results).word}: {path} makes no claims")
        return
    out = console()
    shown = results if rows or fits_a_screen(_LINES * len(results)) else [one for one in results if one.outcome != "holds"]
    if shown:
        print_table(out, claim_table(shown))
    if len(shown) < len(results):
        print_wrapped(out, f"{count(len(results) - len(shown), 'claim')} that hold, one by one: flashmoe claims --rows")
    counts = Counter(one.outcome for one in results)
    words = f"{counts['holds']} hold, {counts['fails']} fail, {counts['no record']} have no record"
    typer.echo(f"{_code(results).word}: {count(len(results), 'claim')}: {words}")
