"""``flashmoe cost``: what the runs took, in time and money."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashmoe_science.cli.evidence import DEFAULT, runs_under

if TYPE_CHECKING:
    from rich.console import Console

    from flashmoe_science.judge.cost import RunCost, TotalCost

_PIPED_WIDTH = 200


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
    from rich.console import Console

    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    _print_runs(console, costs)
    _print_kernels(console, total)
    words = f"{total.runs} runs, {_duration(total.wall_seconds)}, of which {_duration(total.timed_seconds)} timed"
    if total.usd is not None:
        words += f": {_usd(total.usd)}" + (f" for the {total.priced} that have a price" if total.priced < total.runs else "")
    else:
        words += "; no price is known (--price USD_PER_HOUR)"
    if total.cut:
        words += f"; {total.cut} were cut and took this at least"
    console.print(words, markup=False)


def _print_runs(console: Console, costs: Sequence[RunCost]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="runs", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in ("run", "suite", "gpu", "wall", "timed", "USD an hour", "USD"):
        table.add_column(heading, justify="left" if heading in ("run", "suite", "gpu") else "right")
    for one in costs:
        wall = "cut" if one.wall_seconds is None else _duration(one.wall_seconds)
        price = "" if one.price_per_hour is None else f"{one.price_per_hour:g}"
        cells = (one.run, one.suite, one.gpu, wall, _duration(one.timed_seconds), price, _usd(one.usd))
        table.add_row(*map(Text, cells))
    console.print(table)
    console.print()


def _print_kernels(console: Console, total: TotalCost) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="kernels, while they were timed", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in ("kernel", "timed", "share", "USD"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for kernel, seconds in total.kernels.items():
        share = seconds / total.timed_seconds if total.timed_seconds else 0.0
        table.add_row(Text(kernel), _duration(seconds), f"{share:.0%}", _usd(total.kernels_usd.get(kernel)))
    console.print(table)
    console.print()


def _duration(seconds: float) -> str:
    """``8.25 s``, ``3 min 12 s`` or ``1 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _usd(amount: float | None) -> str:
    return "" if amount is None else f"${amount:.4f}" if amount < 0.1 else f"${amount:.2f}"
