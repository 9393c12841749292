"""``flashmoe claims``: what was claimed beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashmoe_science.cli.evidence import CLAIMS, DEFAULT, check_folder, runs_under

if TYPE_CHECKING:
    from rich.console import Console

    from flashmoe_science.judge.gate.claims import ClaimResult

GOOD, FAILS, NO_RECORD = 0, 1, 3
_COLOURS = {"holds": "green", "fails": "red", "no record": "yellow"}
_PIPED_WIDTH = 200


def claims(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Claims, as TOML (EVIDENCE/claims.toml).")] = None,
    evidence: Annotated[Path, typer.Option("--evidence", help="Folder with run records.")] = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON.")] = False,
) -> int:
    """Hold claims against the records: each holds, fails by so much, or has no record.

    A claim is a TOML table: a sentence, which problems and kernels it is about, a statistic and what that must reach.

    \b
      [[claim]]
      id = "causal-never-slower"
      text = "Causal, bf16: no problem on which the best peer is faster"
      gpu = "h200"
      suite = "long"          # or any
      clock = "graph"         # or eager
      mask = "causal"         # also op, problem, dtype, head_dim, min_seqlen, max_seqlen, cache
      dtype = "bf16"
      problems = 18           # how many it is about: fewer on record are not enough
      statistic = "count"     # or geomean, min, max
      verdict = "slower"      # for a count
      at_most = 0             # or at_least

    Without kernel = "NAME" the fastest of our kernels on each problem is meant; without rival = "NAME" the best peer. Instead
    of their ratio, quantity = "time_ns", "tflops", "gbps" or "memory" asks for the kernel's own.

    It holds only if the near end of the 95% interval reaches the threshold, on all of its problems. Where several runs measured
    a problem, the one that is worst for the claim speaks.

    Exit code: 0 all hold, 1 one fails, 2 it could not run, 3 none fails but one has no record.

    \b
    Examples:
      flashmoe claims
      flashmoe claims mine.toml --evidence reports/20260102-030405
      flashmoe claims --json
    """
    from flashmoe_science.judge.gate.claim import read_claims
    from flashmoe_science.judge.gate.claims import judge_claim
    from flashmoe_science.judge.standing import JudgedRun, standing

    # What is asked is read before the records, which take long: a file that is not there is said at once.
    check_folder(evidence)
    path = file if file is not None else evidence / CLAIMS
    asked = read_claims(path)
    judged = [JudgedRun(run) for run in runs_under(evidence)]
    verdicts, _ = standing(judged)
    results = [judge_claim(claim, verdicts, judged) for claim in asked]
    if as_json:
        typer.echo(json.dumps(_as_dict(results), indent=1))
    else:
        _print(results, path)
    if any(result.outcome == "fails" for result in results):
        return FAILS
    return NO_RECORD if any(result.outcome == "no record" for result in results) else GOOD


def _as_dict(results: Sequence[ClaimResult]) -> dict[str, Any]:
    return {
        "claims": [
            {
                "id": one.claim.id,
                "text": one.claim.text,
                "asks": f"{one.claim.statistic} {one.claim.demand}",
                "outcome": one.outcome,
                "measured": one.measured,
                "low": one.low,
                "high": one.high,
                "missed_by": one.missed_by,
                "refuted": one.refuted,
                "problems": one.problems,
                "worst_problem": one.worst_problem,
                "runs": list(one.runs),
                "quick": one.quick,
                "why": one.why,
            }
            for one in results
        ],
    }


def _print(results: Sequence[ClaimResult], path: Path) -> None:
    from rich.console import Console

    if not results:
        typer.echo(f"{path} makes no claims")
        return
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    for result in results:
        _print_claim(console, result)
    counts = {outcome: sum(one.outcome == outcome for one in results) for outcome in _COLOURS}
    words = f"{_count(len(results), 'claim')}: {counts['holds']} hold"
    words += f", {counts['fails']} fail, {counts['no record']} have no record"
    console.print(words, markup=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _print_claim(console: Console, result: ClaimResult) -> None:
    from rich.text import Text

    from flashmoe_science.judge.gate.claim import ANY

    claim = result.claim
    head = Text(result.outcome, style=_COLOURS[result.outcome])
    head.append(f"  {claim.id}: {' '.join(claim.text.split())}", style="default")
    console.print(head, soft_wrap=True)
    kernel = claim.kernel or "fastest of ours"
    who = f"{kernel} against {claim.rival}" if claim.quantity == "ratio" else f"{claim.quantity} of {kernel}"
    suite = "any suite" if claim.suite == ANY else claim.suite
    where = f"{suite} on {claim.gpu}, {claim.clock} clock, {claim.cache} cache"
    lines = [f"asks {claim.statistic} {claim.demand} ({who}; {where}; {_count(claim.problems, 'problem')})"]
    if result.measured is not None:
        measured = f"{result.measured:.4g}{claim.unit}"
        interval = "" if result.low == result.high else f" [{result.low:.4g}, {result.high:.4g}]"
        worst = f"; worst is {result.worst_problem}" if result.worst_problem else ""
        on = _count(result.problems, "problem")
        quick = " (quick: few samples)" if result.quick else ""
        lines.append(f"measured {measured}{interval} on {on}{worst}; runs {', '.join(result.runs)}{quick}")
    if result.why:
        proven = " (the records show the contrary)" if result.refuted else ""
        lines.append(f"{result.why}{proven}")
    for line in lines:
        console.print(f"    {line}", markup=False, soft_wrap=True)
