"""``flashmoe prove``: measure, judge, report; or, where there is no GPU, all of that which needs none."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flashmoe_science.cli.progress import Screen
    from flashmoe_science.judge.verdicts import Verdict
    from flashmoe_science.measure.recorder import Outcome
    from flashmoe_science.measure.request import Request
    from flashmoe_science.measure.session import Earlier, Surroundings

GOOD, WRONG, COULD_NOT_RUN, UNTRUSTWORTHY = 0, 1, 2, 3  # as measure.recorder has them, which imports PyTorch
_WORST_FIRST = (WRONG, COULD_NOT_RUN, UNTRUSTWORTHY, GOOD)
_PASSED_ON = ("kernel", "quick", "full", "warm", "sanitize", "draw", "seed")  # options that a Request has by the same name
_BESIDE_RESUME = ("resume", "budget", "share", "as_json")


def prove(
    context: typer.Context,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FUNCTION|SUITE|PROBLEM",
            help="module:function or file.py:function of your own; documents, long, decode, chunked, serving, quick, cpu, "
            "or the text of a problem.",
        ),
    ] = None,
    kernel: Annotated[str | None, typer.Option("--kernel", help="Measure one kernel of the package in place of all.")] = None,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", metavar="KERNEL", help='A rival (or a function), may be repeated; "all" is every peer.'),
    ] = None,
    draw: Annotated[
        int | None,
        typer.Option("--draw", metavar="N", help="N problems drawn at random around the suite, in place of the suite."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples, configs and cases.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every config and every peer.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for records and report (reports/<time>-<id>).")] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="FOLDER", help="Measure what a run that was cut left, with the options it was given."),
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Time beside another run on this GPU, which disturbs both, in place of waiting.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="600|5m|1h", help="Stop in time with what there is."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the inputs, and of what --draw draws.")] = 42,
    watchdog: Annotated[float, typer.Option("--watchdog", help="Seconds that a function may take over one step.")] = 60.0,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Look at one call of a function with compute-sanitizer too (on a GPU).")
    ] = False,
    warm: Annotated[
        bool, typer.Option("--warm", help="Time with the L2 cache warm too, beside the cold rows (on a GPU).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> int:
    """Prove kernels: call path, correctness, speed on two clocks against the best rivals, verdicts and a report.

    Without a function this is about the kernels of the package. Without a GPU they are built for GPUs that are not here and
    held to the fp64 oracle in Triton's interpreter, and PyTorch's attention is timed on the CPU.

    A function of your own, module:function or file.py:function, is held to the attention contract fn(q, k, v, causal=False,
    softmax_scale=None), or to the contract that it names (flashmoe_science.contract). It is checked on a sweep of tiny problems
    first (flashmoe check), then examined and timed in a process of its own: a crash, a hang or an exit is recorded, and the
    rest goes on. What is printed, and the report, are of that run alone.

    Each row is on disk as it comes. What a run that was killed, or whose budget was spent, left to do is measured by --resume,
    into a second file beside the first.

    Exit code: 0 good, 1 a kernel is wrong, 2 it could not run, 3 a number was refused or a promise broken.

    \b
    Examples:
      flashmoe prove
      flashmoe prove documents long --budget 10m
      flashmoe prove long --draw 20
      flashmoe prove "attn b1 h16 q4096 d128 bf16 causal" --against sdpa --against fa3
      flashmoe prove my_module:my_attention --against sdpa
      flashmoe prove examples/row_softmax.py:row_softmax examples/cpu_attention.py:attention --quick
      flashmoe prove --resume reports/20260102-030405-a1b2c3
    """
    from flashmoe_science.cli.budget import price_per_hour, seconds_of_budget
    from flashmoe_science.cli.progress import Screen
    from flashmoe_science.measure.request import Request

    price, asked = price_per_hour(), context.params
    folder, earlier = None, None
    if resume is not None:
        from flashmoe_science.cli.resume import earlier_of

        folder, earlier, given = earlier_of(context, resume, _BESIDE_RESUME)
        asked = given | {"budget": budget or given["budget"]}
    request = Request(
        targets=tuple(asked["targets"] or ()),
        against=tuple(asked["against"] or ()),
        watchdog_s=asked["watchdog"],
        budget_s=None if asked["budget"] is None else seconds_of_budget(asked["budget"]),
        command=("flashmoe", *sys.argv[1:]),
        **{name: asked[name] for name in _PASSED_ON},
    )
    plan = Plan(request)
    folder = folder or _folder(out)
    with Screen() as screen:
        outcomes = _measured(plan, folder, screen, share, price, earlier)
        screen.stage("judging")
        verdicts, cost = judge(folder)
    code = exit_code(outcomes, verdicts)
    found = _found(outcomes)
    if as_json:
        judged = {"verdicts": [verdict.as_dict() for verdict in verdicts], "cost": cost}
        typer.echo(json.dumps({"exit_code": code, "folder": str(folder), **found, **judged}, indent=2))
    else:
        _print(code, folder, plan, found, verdicts, cost, sum(outcome.problems_left for outcome in outcomes))
    return code


class Plan:
    """A request made definite. Making it raises ValueError, in one line, for whatever cannot be done."""

    def __init__(self, request: Request) -> None:
        from flashmoe_science.measure.bench import bench_here
        from flashmoe_science.measure.offline import kernels_to_build
        from flashmoe_science.measure.request import groups
        from flashmoe_science.measure.run import taking_part

        self.request, self.bench = request, bench_here()
        if request.warm and self.bench.gpu is None:
            raise ValueError("--warm needs a GPU, and there is none here: a CPU's caches are not emptied, so every row is warm")
        self.groups = groups(request, self.bench.gpu)
        self.problems = tuple(dict.fromkeys(problem for group in self.groups for problem in group.problems)) or None
        builds = self.bench.gpu is None and not request.functions
        ops = {group.op for group in self.groups}
        self.to_build = tuple(one for one in kernels_to_build(request.kernel) if builds and one.op in ops)
        for group in () if request.functions else self._timed_groups():
            taking_part(request, group, self.bench.gpu)
        self.found: list[str] = []  # what a run without a GPU found, in words

    def run(self, folder: Path, screen: Screen, around: Surroundings, earlier: Earlier) -> list[Outcome]:
        """Every stage in order; after one that fails, none further."""
        from dataclasses import replace

        from flashmoe_science.measure.run import FunctionsRun, KernelsRun
        from flashmoe_science.measure.session import Session
        from flashmoe_science.store import RunWriter

        began = time.monotonic()
        if self.request.functions:
            with RunWriter(_free(folder, "functions")) as writer:
                session = Session(self.bench, writer, self.request, screen.watch, around, earlier)
                return [FunctionsRun(session, self.problems).run(self.groups[0].name if len(self.groups) == 1 else "custom")]
        outcomes: list[Outcome] = []
        if self.to_build and not earlier.done:
            outcomes.append(self._offline(folder, screen, around))
        for group in self._timed_groups():
            if outcomes and outcomes[-1].exit_code in (WRONG, COULD_NOT_RUN):
                break
            now = replace(around, seconds_gone=time.monotonic() - began)
            with RunWriter(_free(folder, group.name)) as writer:
                session = Session(self.bench, writer, self.request, screen.watch, now, earlier)
                outcomes.append(KernelsRun(session, group).run())
        return outcomes

    def _timed_groups(self) -> tuple[Any, ...]:
        """Without a GPU a kernel of ours that is named is built, and there is nothing of it to time."""
        return () if self.to_build and self.request.kernel is not None else self.groups

    def _offline(self, folder: Path, screen: Screen, around: Surroundings) -> Outcome:
        from flashmoe_science.measure.offline import SUITE, OfflineRun
        from flashmoe_science.measure.session import Session
        from flashmoe_science.store import RunWriter

        named = self.problems if self.request.targets else None
        with RunWriter(_free(folder, SUITE)) as writer:
            session = Session(self.bench, writer, self.request, screen.watch, around)
            run = OfflineRun(session, self.to_build, named)
            ended = run.run()
        self.found += run.found
        return ended


def _free(folder: Path, name: str) -> Path:
    """A file of that name that does not exist yet: run-NAME.jsonl, then run-NAME-2.jsonl and so on."""
    path, number = folder / f"run-{name}.jsonl", 2
    while path.exists():
        path, number = folder / f"run-{name}-{number}.jsonl", number + 1
    return path


def _measured(
    plan: Plan, folder: Path, screen: Screen, share: bool, price: float | None, earlier: Earlier | None
) -> list[Outcome]:
    """Measure when the device is free. Raises StoreError, DeviceBusy: in one line."""
    from flashmoe_science.measure.device_lock import device_name, turn
    from flashmoe_science.measure.session import NOTHING_EARLIER, Surroundings

    try:
        with turn(device_name(plan.bench.device), share, screen.stage) as beside:
            return plan.run(folder, screen, Surroundings(beside, price), earlier or NOTHING_EARLIER)
    except KeyboardInterrupt:
        typer.echo(f"the rows so far are in {folder}; to go on: flashmoe prove --resume {folder}", err=True)
        raise


def judge(folder: Path) -> tuple[list[Verdict], str]:
    """Judge the runs in ``folder`` and write a report into it: their verdicts, and what they took. Raises StoreError."""
    from flashmoe_science.cli.evidence import runs_under
    from flashmoe_science.judge.report.cost import cost_line
    from flashmoe_science.judge.report.html import write_report
    from flashmoe_science.judge.standing import JudgedRun, standing

    if not folder.is_dir():
        raise ValueError(f"the records are gone: something removed {str(folder)!r} while the run was on")
    judged = [JudgedRun(run) for run in runs_under(folder)]
    write_report(judged, folder)
    return standing(judged), cost_line([one.run for one in judged])


def exit_code(outcomes: Sequence[Outcome], verdicts: Sequence[Verdict]) -> int:
    """The worst of what was measured and of what was judged: 3 where a GPU's number of ours, or every number of a CPU, was
    refused as untrustworthy, or a promise was broken.

    A CPU that does other work gives an untrustworthy pair now and then; that is shown, and only nothing else is a failure.
    """
    refused = [verdict for verdict in verdicts if verdict.verdict == "refused"]
    on_gpu = any(verdict.gpu != "cpu" and verdict.origin in ("ours", "candidate") for verdict in refused)
    broken = any(verdict.promise == "broken" for verdict in verdicts)
    judged = UNTRUSTWORTHY if broken or on_gpu or (refused and len(refused) == len(verdicts)) else GOOD
    codes = {outcome.exit_code for outcome in outcomes} | {judged}
    return next(code for code in _WORST_FIRST if code in codes)


def _folder(out: Path | None) -> Path:
    """The folder of this run, made. Raises ValueError: it cannot be made or written."""
    if out is not None and str(out) in ("", "."):
        raise ValueError("--out is empty, or this very folder; give a folder for the records and the report")
    folder = out if out is not None else Path("reports") / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    try:
        folder.mkdir(parents=True, exist_ok=out is not None)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--out is {str(folder)!r}, which cannot be written: {error.strerror}; give another folder") from error
    return folder


def _found(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the stages found, added up."""

    def every(name: str) -> list[str]:
        return [reason for outcome in outcomes for reason in getattr(outcome, name)]

    return {
        "checked": sum(outcome.checked for outcome in outcomes),
        "timed": sum(outcome.timed for outcome in outcomes),
        "wrong": every("wrong"),
        "codes": list(dict.fromkeys(every("codes"))),
        "untrustworthy": every("untrustworthy"),
        "peers_refused": every("peers_refused"),
        "stopped": [outcome.stopped for outcome in outcomes if outcome.stopped],
    }


def _print(
    code: int, folder: Path, plan: Plan, found: dict[str, Any], verdicts: Sequence[Verdict], cost: str, left: int
) -> None:
    """A table of the verdicts, what was found wrong or refused, and what it comes to."""
    from flashmoe_science.cli.sheet import console, put_wrapped
    from flashmoe_science.cli.verdicts import print_verdicts

    out = console()
    print_verdicts(out, verdicts)
    for text in (cost, *plan.found):
        put_wrapped(out, text)
    labels = {"wrong": "wrong", "untrustworthy": "refused", "peers_refused": "peer refused", "stopped": "stopped"}
    for name, label in labels.items():
        for reason in found[name]:
            put_wrapped(out, f"{label}: {reason}")
    if left:
        typer.echo(f"not measured: {left} problems (the budget is spent); to go on: flashmoe prove --resume {folder}")
    refused = max(len(found["peers_refused"]), sum(verdict.verdict == "refused" for verdict in verdicts))
    words = {
        GOOD: f"good, but for {refused} refused number{'s' * (refused != 1)}" if refused else "all good",
        WRONG: "a kernel is wrong",
        COULD_NOT_RUN: "it could not run",
        UNTRUSTWORTHY: "a number was refused, or a promise broken",
    }[code]
    told = f"{found['checked']} results held to the oracle, {found['timed']} pairs timed; records and report in {folder}"
    typer.echo(f"{words}: {told}")
