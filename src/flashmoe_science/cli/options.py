"""Options of ``flashmoe prove``: a budget as a duration, a shard of the problems, the price of an hour of the machine, and
--resume, by which a run that was cut short is continued with its own options."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flashmoe_science.cli import main
from flashmoe_science.locks import hold
from flashmoe_science.store import read_runs

if TYPE_CHECKING:
    from flashmoe_science.measure.session import Earlier

PRICE_VARIABLE = "FLASHMOE_PRICE_PER_HOUR"
_MAX_PRICE = 1_000_000
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BUDGET = re.compile(r"([0-9]*\.?[0-9]+)\s*(s|m|min|h|)", re.IGNORECASE)


def seconds_of_budget(text: str) -> float:
    """Seconds that a budget lasts. Raises ValueError: words that are no budget, or nothing at all."""
    match = _BUDGET.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"--budget is {text!r}; it must be seconds (600) or a duration (90s, 5m, 1.5h)")
    amount = float(match[1])
    if not 0 < amount < math.inf:
        raise ValueError(f"--budget is {text!r}; it must be more than 0")
    return amount * _UNITS[match[2].lower()]


def shard_of(text: str) -> tuple[int, int]:
    """``K/N`` as two numbers. Raises ValueError: they are none, or K is not from 1 to N."""
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--shard is {text!r}; it must be K/N with K from 1 to N, as 1/4 for the first of four processes")
    return int(match[1]), int(match[2])


def price_per_hour() -> float | None:
    """USD an hour for this machine, from FLASHMOE_PRICE_PER_HOUR; None where the variable is not set. Raises ValueError: it is
    no number of USD an hour."""
    text = os.environ.get(PRICE_VARIABLE, "").strip()
    if not text:
        return None
    with contextlib.suppress(ValueError):
        if 0 <= (price := float(text)) <= _MAX_PRICE:
            return price
    raise ValueError(f"{PRICE_VARIABLE} is {text!r}; it must be USD an hour, from 0 to {_MAX_PRICE:,}")


def earlier_of(context: typer.Context, folder: Path, allowed: Collection[str]) -> tuple[Earlier, dict[str, Any]]:
    """What the runs of a folder leave to do, and the options of the command that made them, by the names of its parameters.

    ``allowed`` are the options that may be combined with --resume. Raises ValueError, in one line, for what cannot be
    resumed."""
    from flashmoe_science.measure.session import Earlier
    from flashmoe_science.measure.world.ranks import world_size

    def refused(why: str) -> ValueError:
        return ValueError(f"--resume is {str(folder)!r}, {why}")

    given = [name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if world_size() > 1:
        raise ValueError("--resume is given under torchrun; a run on several ranks is begun anew")
    if others := [name for name in given if name not in allowed]:
        raise ValueError(f"--resume takes the options that the run was given; leave out {', '.join(others)}")
    if not folder.is_dir():
        raise refused("which is no folder; give the folder of a run")
    runs = read_runs(folder)
    for run in runs:
        if run.path is not None and not run.complete:
            with run.path.open("rb") as file:
                if not hold(file, shared=True):
                    raise refused(f"where {run.path} is being written by another process; wait until that run ends")
    if any(run.header.world > 1 for run in runs):
        raise refused("which holds a run on several ranks; begin it anew, under torchrun")
    commands = {tuple(run.header.command) for run in runs if "--resume" not in run.header.command}
    if not commands:
        raise refused("where no run has begun; start it anew")
    if len(commands) > 1:
        raise refused(f"which holds runs of {len(commands)} commands; give a folder of one")
    (command,) = commands
    if command[1:2] != ("prove",):
        raise refused(f"which was not made by flashmoe prove but by '{' '.join(command[:2])}'")
    words = command[2:]
    try:
        prove = typer.main.get_command(main.app).get_command(None, "prove")  # type: ignore[attr-defined]
        options: dict[str, Any] = prove.make_context("prove", list(words)).params  # as click reads them
    except main.UsageError as error:
        raise refused(f"whose command {' '.join(words)!r} is not understood: {error}") from None
    return Earlier.of(runs, options["against"] or ()), options
