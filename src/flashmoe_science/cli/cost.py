"""``flashmoe cost``: what the runs took, in time and money."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashmoe_science.cli.evidence import DEFAULT, runs_under
from flashmoe_science.judge.formats import duration, usd

if TYPE_CHECKING:
    from rich.console import Console

    from flashmoe_science.judge.cost import RunCost, TotalCost


def cost(
    evidence: Annotated[Path, typer.Option("--evidence", help="Folder with run records.")] = DEFAULT,
    price: Annotated[
        float | None,
        typer.Option("--price", metavar="USD_PER_HOUR", help="Of the machine, for every run (each run's own)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print runs, kernels and the total as JSON.")] = False,
) -> None:
    """Print what runs took: per run, per kernel and in all.

    A run is paid for from its start to its end, checking and building included. A kernel's share is the time in which its calls
    were timed. No price is assumed: money is left out where --price, FLASHMOE_PRICE_PER_HOUR and the run's record give none.

    \b
    Examples:
      flashmoe cost
      flashmoe cost --price 3.50 --evidence reports/20260102-030405
      flashmoe cost --json
    """
    from flashmoe_science.cli.budget import price_or_default
    from flashmoe_science.judge.cost import at_price, run_cost, total_cost

    # A price that a run recorded is nearer the truth than the environment's, which may be of another machine.
    costs = [run_cost(run) for run in at_price(runs_under(evidence), price_or_default(price), every=price is not None)]
    total = total_cost(costs)
    if as_json:
        listed = [{**dataclasses.asdict(one), "usd": one.usd} for one in costs]
        typer.echo(json.dumps({"runs": listed, "total": dataclasses.asdict(total)}, indent=1))
        return
    if not costs:
        typer.echo(f"No records under {evidence}.")
        return
    _print(costs, total)


def _print(costs: Sequence[RunCost], total: TotalCost) -> None:
    from flashmoe_science.cli.sheet import console, put_wrapped

    out = console()
    _print_runs(out, costs)
    _print_kernels(out, total)
    runs = "1 run" if total.runs == 1 else f"{total.runs} runs"
    words = f"{runs}, {duration(total.wall_seconds, 2)}, of which {duration(total.timed_seconds, 2)} timed"
    if total.usd is not None:
        words += f": {usd(total.usd)}" + (f" for the {total.priced} that have a price" if total.priced < total.runs else "")
    else:
        words += "; no price is known (--price USD_PER_HOUR)"
    if total.cut:
        words += f"; {total.cut} {'was' if total.cut == 1 else 'were'} cut and took this at least"
    put_wrapped(out, words)


def _print_runs(out: Console, costs: Sequence[RunCost]) -> None:
    from flashmoe_science.cli.sheet import Column, Line, print_sheet

    columns = (
        Column("suite"), Column("gpu"), Column("wall", right=True), Column("timed", right=True, spare=1),
        Column("USD an hour", right=True, spare=2), Column("USD", right=True),
    )  # fmt: skip
    lines = []
    for one in costs:
        wall = "cut" if one.wall_seconds is None else duration(one.wall_seconds, 2)
        price = "" if one.price_per_hour is None else f"{one.price_per_hour:g}"
        lines.append(Line(one.run, (one.suite, one.gpu, wall, duration(one.timed_seconds, 2), price, usd(one.usd))))
    print_sheet(out, "runs", "run", columns, lines)
    out.print()


def _print_kernels(out: Console, total: TotalCost) -> None:
    from flashmoe_science.cli.sheet import Column, Line, print_sheet

    columns = (Column("timed", right=True), Column("share", right=True), Column("USD", right=True))
    lines = []
    for kernel, seconds in total.kernels.items():
        share = seconds / total.timed_seconds if total.timed_seconds else 0.0
        lines.append(Line(kernel, (duration(seconds, 2), f"{share:.0%}", usd(total.kernels_usd.get(kernel)))))
    print_sheet(out, "kernels, while they were timed", "kernel", columns, lines)
    out.print()
