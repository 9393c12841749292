"""``flashmoe claims``: what was claimed beside what was measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashmoe_science.cli.evidence import CLAIMS, DEFAULT, Evidence, check_folder, runs_under

if TYPE_CHECKING:
    from rich.console import Console

    from flashmoe_science.judge.gate.claims import ClaimResult

GOOD, FAILS, NO_RECORD = 0, 1, 3
_COLOURS = {"holds": "green", "fails": "red", "no record": "yellow"}
_PIPED_WIDTH = 200


def claims(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Claims, as TOML (EVIDENCE/claims.toml).")] = None,
    evidence: Evidence = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON.")] = False,
) -> int:
    """Hold claims against the records: each holds, fails by so much, or has no record.

    A claim is a TOML table: a sentence, which problems and kernels it is about, a statistic and what that must reach.

    \b
      [[claim]]
      id = "causal-as-fast"
      text = "Causal, bf16: as fast as the best peer on every problem"
      gpu = "h200"
      suite = "long"          # or any
      clock = "graph"         # or eager
      mask = "causal"         # also op, problem, dtype, head_dim, min_seqlen, max_seqlen, cache
      dtype = "bf16"
      problems = 18           # how many it is about: fewer on record are not enough
      statistic = "min"       # or geomean, max
      at_least = 0.98         # or at_most

    Without kernel = "NAME" the fastest of our kernels on each problem is meant; without rival = "NAME" the best peer. Instead
    of their ratio, quantity = "time_ns" or "memory" asks for the kernel's own.

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
    path = file or evidence / CLAIMS
    asked = read_claims(path)
    judged = [JudgedRun(run) for run in runs_under(evidence)]
    verdicts = standing(judged)
    results = [judge_claim(claim, verdicts, judged) for claim in asked]
    if as_json:
        typer.echo(json.dumps({"claims": [_as_dict(one) for one in results]}, indent=1))
    else:
        _print(results, path)
    outcomes = {result.outcome for result in results}
    return FAILS if "fails" in outcomes else NO_RECORD if "no record" in outcomes else GOOD


def _as_dict(one: ClaimResult) -> dict[str, Any]:
    values = {"id": one.claim.id, "text": one.claim.text, "asks": f"{one.claim.statistic} {one.claim.demand}"}
    return values | {field.name: getattr(one, field.name) for field in fields(one) if field.name != "claim"}


def _print(results: Sequence[ClaimResult], path: Path) -> None:
    from flashmoe_science.cli.sheet import console

    if not results:
        typer.echo(f"{path} makes no claims")
        return
    out = console(_PIPED_WIDTH)
    for result in results:
        _print_claim(out, result)
    counts = Counter(one.outcome for one in results)
    words = f"{counts['holds']} hold, {counts['fails']} fail, {counts['no record']} have no record"
    out.print(f"{_count(len(results), 'claim')}: {words}", markup=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _print_claim(out: Console, result: ClaimResult) -> None:
    from rich.text import Text

    claim = result.claim
    head = Text(result.outcome, style=_COLOURS[result.outcome])
    out.print(head.append(f"  {claim.id}: {' '.join(claim.text.split())}", style="default"), soft_wrap=True)
    kernel = claim.kernel or "fastest of ours"
    who = f"{kernel} against {claim.rival}" if claim.quantity == "ratio" else f"{claim.quantity} of {kernel}"
    suite = "any suite" if claim.suite == "any" else claim.suite
    where = f"{suite} on {claim.gpu}, {claim.clock} clock, {claim.cache} cache"
    lines = [f"asks {claim.statistic} {claim.demand} ({who}; {where}; {_count(claim.problems, 'problem')})"]
    if result.measured is not None:
        interval = "" if result.low == result.high else f" [{result.low:.4g}, {result.high:.4g}]"
        quick = " (quick: few samples)" if result.quick else ""
        on = f"on {_count(result.problems, 'problem')}; worst is {result.worst_problem}; runs {', '.join(result.runs)}{quick}"
        lines.append(f"measured {result.measured:.4g}{claim.unit}{interval} {on}")
    if result.why:
        lines.append(f"{result.why}{' (the records show the contrary)' if result.refuted else ''}")
    for line in lines:
        out.print(f"    {line}", markup=False, soft_wrap=True)
