"""``flashmoe ratchet``: a gate that keeps the best ratios, and fails where one is proven to have regressed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from flashmoe_science.cli.evidence import DEFAULT, folder_named, judged_under, runs_under
from flashmoe_science.cli.sheet import COLOURS, console
from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.judge.gate.ratchet import ALL, Check, Outcome, check, lowered, raised, read_ratchet, write_ratchet
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.operations import parse_problem

# How many entries of each outcome are listed; few of an outcome that needs no action.
_SHOWN: dict[Outcome, int] = {"regressed": 9999, "refused": 9999, "gained": 9999, "absent": 8, "new": 8, "held": 0}
_RUNS = "runs"  # a folder of that name next to the file holds the committed records


def ratchet(
    runs: Annotated[
        Path, typer.Option("--runs", parser=folder_named, metavar="PATH", help="Folder with the new records.")
    ] = DEFAULT,
    file: Annotated[Path, typer.Option("--file", help="File of the kept ratios.")] = DEFAULT / "ratchet.json",
    update: Annotated[bool, typer.Option("--update", help="Add proven gains and new problems.")] = False,
    accept: Annotated[str | None, typer.Option("--accept", metavar="PROBLEM|all", help="Lower its kept ratio.")] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why it is lowered; kept in the file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every entry's outcome as JSON.")] = False,
) -> int:
    """Compare new measurements with the best kept ratio of each problem, GPU, clock and cache.

    A kept ratio is to a named rival, so that the machine's state cancels. The command fails on a proven regression: where the
    whole interval, widened for the number of entries, lies below the kept interval by more than 2%, or by more than 20% on the
    eager clock, which depends on the host's state. --update raises a kept ratio on a proven gain of as much. Only --accept,
    with a reason, lowers one. A quick run raises nothing.

    A run that was not asked for an entry's rival (prove --against) leaves the entry alone.

    The kept ratios are compared with the runs that they rest on, if those are beside the file or under --runs.

    Exit code: 0 nothing regressed, 1 a proven regression, 2 it could not run, 3 a kept problem was measured but has no number
    that can be believed, or none was measured at all. A kept problem that no run here measured is named, and fails nothing.

    \b
    Examples:
      flashmoe ratchet --update            keep what the committed records show
      flashmoe ratchet --runs reports/ci   in CI, after prove --out reports/ci
      flashmoe ratchet --accept all --reason "exact exponentials"
    """
    if (accept is None) != (reason is None) or (reason is not None and not reason.strip()):
        raise ValueError("--accept PROBLEM and --reason TEXT need each other; a lowering is kept with its reason")
    if accept not in (None, ALL):
        accept = str(parse_problem(accept or ""))
    kept = read_ratchet(file) if file.exists() or not update else []
    now = judged_under(runs, "--runs")
    checks = check(kept, now, _runs_to_compare(file, runs, now))
    moved = kept if accept is None else lowered(kept, checks, accept, " ".join((reason or "").split()))
    if update:
        moved = raised(moved, checks)
    if moved != kept:
        write_ratchet(file, moved)
    before, after = ({one.key: one for one in entries} for entries in (kept, moved))
    changed = {key for key, one in after.items() if before.get(key) != one}
    # On another machine, for example, the gate compares nothing.
    vacant = bool(kept) and all(one.outcome == "absent" for one in checks if one.kept) and not changed
    if as_json:
        typer.echo(json.dumps({"entries": [one.as_dict(after.get(one.key)) for one in checks]}, indent=1))
    else:
        _print(checks)
        if changed:
            typer.echo(f"{file}: {len(changed)} of {len(moved)} entries changed")
        elif vacant:
            typer.echo("no kept ratio was measured here, so nothing was compared (see --runs; --update adds new ratios)")
        elif update and any(one.outcome in ("gained", "new") for one in checks):
            typer.echo("nothing is added: a quick run raises nothing; measure in full (without --quick)")
    if any(one.outcome == "regressed" and one.key not in changed for one in checks):
        return ExitCode.WRONG
    return ExitCode.NO_NUMBER if vacant or any(one.outcome == "refused" for one in checks) else ExitCode.GOOD


def _runs_to_compare(file: Path, folder: Path, now: Sequence[JudgedRun]) -> list[JudgedRun]:
    """The runs measured now, and the committed ones in the folder of the file."""
    committed = file.parent
    if not (committed / _RUNS).is_dir() or committed.resolve().is_relative_to(folder.resolve()):
        return list(now)
    ids = {judged.run.header.run for judged in now}
    return [*now, *(JudgedRun(run) for run in runs_under(committed) if run.header.run not in ids)]


def _print(checks: Sequence[Check]) -> None:
    out = console()
    for outcome, most in _SHOWN.items():
        found = [f"{one.key.words}{f': {one.why}' if one.why else ''}" for one in checks if one.outcome == outcome]
        for words in [*found[:most], *([f"and {len(found) - most} more"] if len(found) > most > 0 else ())]:
            out.print(Text(f"{outcome}  ", style=COLOURS.get(outcome, "")).append(words, style="default"), soft_wrap=True)
    counts = Counter(one.outcome for one in checks)
    totals = (f"{counts[outcome]} {outcome}" for outcome in _SHOWN if counts[outcome])
    out.print(", ".join(totals) or "nothing to compare", markup=False)
