"""``flashmoe tune``: measure which of our kernels and configs are the fastest on this card, for dispatch to read."""

from __future__ import annotations

import secrets
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashmoe_science.cli.progress import Screen
from flashmoe_science.cli.sheet import console, print_wrapped
from flashmoe_science.dispatch import tuned
from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.table import SCHEMA, Entry, committed_table
from flashmoe_science.exit_codes import ExitCode, worst
from flashmoe_science.hardware import probe
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.judge.formats import count
from flashmoe_science.judge.gate.entries import entries_as_text
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.operations import operation
from flashmoe_science.store import read_runs, write_whole

if TYPE_CHECKING:
    from flashmoe_science.measure.session import Outcome

DEFAULT = ("long", "decode", "documents", "moe-qwen3")
_AFTER_S = 15.0  # to judge what was measured, and to end a problem that was begun


def tune(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="SUITE|PROBLEM", help=f"Suites, or problems as text ({' '.join(DEFAULT)}).")
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="End the run within this time.")] = 10.0,
) -> int:
    """Measure on this card which kernels and configs are the fastest, and let dispatch choose by that.

    It is for a card without records, where each call is served by the kernel's own first guess. Each of our kernels, with its
    configs, is compared with the oracle and timed against PyTorch's operators, as by flashmoe prove. Records and entries are
    kept in the user's cache folder, in flashmoe-science/tuned (XDG_CACHE_HOME, else ~/.cache). Every process that starts later
    on this card reads them with the committed records, unless FLASHMOE_TUNED=0; flashmoe explain then says "tuned on this
    machine". A measured choice also serves problems within a factor of two of its own. To have choices for your model, name its
    problems.

    Exit code: 0 tuned, 1 a kernel is wrong, 2 it could not run, 3 nothing was tuned, or a number was refused.

    \b
    Examples:
      flashmoe tune
      flashmoe tune decode --minutes 4
      flashmoe tune "attn b1 h32 hk8 q4096 d128 bf16 causal"
    """
    gpu = probe.current_gpu()
    if gpu is None:
        raise ValueError("there is no NVIDIA GPU here, and tuning measures on one")
    if not 0.5 <= minutes <= 24 * 60:
        raise typer.BadParameter(f"it is {minutes:g}; it must be from 0.5 to {24 * 60}", param_hint="--minutes")
    runs = tuned.folder() / "runs"
    folder = runs / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    folder.mkdir(parents=True)
    with Screen() as screen:
        outcomes = _measured(tuple(targets or DEFAULT), 60.0 * minutes - _AFTER_S, folder, screen)
        screen.watch("judging")
        entries = _promoted(runs, gpu)
    out = console()
    for reason in (reason for one in outcomes for reason in (*one.wrong, *one.untrustworthy, *filter(None, (one.stopped,)))):
        print_wrapped(out, f"left out: {reason}")
    mine = {outcome.run for outcome in outcomes}
    made = [one for one in entries if one.run in mine]
    changed = sum(_before(one, gpu) != (one.kernel, one.config) for one in made)
    words = f"{count(len(made), 'problem')} tuned on {gpu.product}, {changed} of them with another kernel or config than before"
    if left := sum(outcome.problems_left for outcome in outcomes):
        words += f"; {left} not measured, the time is over"
    code = worst([*(one.exit_code for one in outcomes), ExitCode.GOOD if made else ExitCode.NO_NUMBER])
    print_wrapped(out, f"{code.word}: {words}; {_path(gpu)} ({tuned.ALLOWED}=0 leaves it out)")
    return code


def _measured(targets: tuple[str, ...], seconds: float, folder: Path, screen: Screen) -> list[Outcome]:
    """Measure the targets, an operation after the other, the one with the fewest problems first; each may take an equal share
    of the time that is left."""
    from flashmoe_science.measure.request import Request, named_groups
    from flashmoe_science.measure.run import Plan

    by_op: dict[str, dict[str, int]] = {}
    for target in targets:
        for group in named_groups(Request(targets=(target,))):
            by_op.setdefault(group.op, {})[target] = len(group.problems)
    outcomes: list[Outcome] = []
    ends = time.monotonic() + seconds
    ordered = sorted(by_op.items(), key=lambda item: sum(item[1].values()))
    for place, (op, words) in enumerate(ordered):
        share = max(1.0, (ends - time.monotonic()) / (len(ordered) - place))
        against = (operation(op).fallback(),)  # what dispatch takes in the place of ours where it is faster
        command = ("flashmoe", *sys.argv[1:])
        request = Request(tuple(words), against=against, quick=True, tunes=True, budget_s=share, command=command)
        outcomes += Plan(request).run(folder, screen.watch)
    return outcomes


def _promoted(runs: Path, gpu: Gpu) -> tuple[Entry, ...]:
    """The entries that all runs on this card support, written for dispatch and read back as dispatch reads them."""
    from flashmoe_science.measure.promote import entries_of

    raw = entries_of([JudgedRun(run) for run in read_runs(runs)], {gpu.name: gpu})
    write_whole(_path(gpu), entries_as_text(SCHEMA, raw, gpu.name))
    return tuned.read_tuned(_path(gpu))


def _path(gpu: Gpu) -> Path:
    return tuned.folder() / f"{gpu.name}.json"


def _before(entry: Entry, gpu: Gpu) -> tuple[object, object]:
    """The kernel and config that serve an entry's problem without what was tuned."""
    op = operation(entry.problem.op)
    decision = select(entry.problem, gpu, committed_table(), op.ours(), op.fallback())
    return decision.kernel, decision.config
