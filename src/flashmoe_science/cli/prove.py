"""``flashmoe prove``: measure, judge, report; or, where there is no GPU, all of that which needs none."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashmoe_science.cli.evidence import runs_under
from flashmoe_science.cli.options import earlier_of, price_per_hour, seconds_of_budget, shard_of
from flashmoe_science.cli.progress import Screen
from flashmoe_science.cli.sheet import console, print_wrapped
from flashmoe_science.cli.verdicts import print_verdicts
from flashmoe_science.exit_codes import ExitCode, worst
from flashmoe_science.judge.ending import code_of, first_lines, left_out
from flashmoe_science.judge.formats import count
from flashmoe_science.judge.report.page import cost_line
from flashmoe_science.judge.report.write import write_report
from flashmoe_science.judge.standing import JudgedRun, standing
from flashmoe_science.judge.verdicts import Verdict, is_brought

if TYPE_CHECKING:
    from flashmoe_science.measure.session import Outcome

_FEW = 8  # verdicts on kernels of the package, that are printed one by one; `flashmoe verdicts` has all
_MAX_REASONS = 6  # of a kind, that are printed; the report has all
_LABELS = {
    "wrong": "wrong",
    "untrustworthy": "refused",
    "peers_refused": "peer refused",
    "stopped": "stopped",
    "left_out": "left out",
}
_PASSED_ON = ("quick", "full", "draw", "seed")  # options that a Request has by the same name
_WITH_RESUME = ("resume", "budget", "as_json")


def prove(
    context: typer.Context,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FUNCTION|SUITE|PROBLEM",
            help="module:function or file.py:function of your own; documents, long, decode, serving, train or another suite "
            "(an unknown name lists them all), or the text of a problem.",
        ),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", metavar="KERNEL", help="Measure only this kernel of the package; may be repeated."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", metavar="KERNEL", help='A rival or a function; may be repeated; "all" is every peer.'),
    ] = None,
    draw: Annotated[
        int | None,
        typer.Option("--draw", metavar="N", help="N problems drawn at random around the suite, in place of the suite."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="K/N", help="The K-th of N parts of each suite: a process for each of N GPUs."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples, configs of our kernels and cases.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every config and every peer.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for records and report (reports/<time>-<id>).")] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="FOLDER", help="Measure what is left of the run in FOLDER, with that run's options."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="600|5m|1h", help="End within this time, builds without a GPU not counted."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the inputs and of --draw.")] = 42,
    watchdog: Annotated[float, typer.Option("--watchdog", help="Seconds that one step of a function may take.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> int:
    """Prove kernels: call path, correctness, speed on two clocks against the best rivals, verdicts and a report.

    Without a function, the package's own kernels are proved. Without a GPU they are compiled for GPUs that are not here and
    compared with the fp64 oracle in Triton's interpreter, and PyTorch's attention is timed on the CPU.

    A function of your own, module:function or file.py:function, must follow the attention contract fn(q, k, v, causal=False,
    softmax_scale=None), or the contract that it names (flashmoe_science.contract). It is first checked on a sweep of tiny
    problems (flashmoe check), then examined and timed in a process of its own. A crash, a hang or an exit is recorded, and the
    run continues. The output and the report cover that run only.

    Under torchrun, kernels that share a problem among GPUs are proved: the suites context, context-backward, context-decode,
    packed, experts and tokens, or problems as text (docs/several-gpus.md).

    Each row is written to disk as it is measured. --resume measures what is left of a run that was killed or whose budget was
    spent, into a second file beside the first.

    The first line of the output is the verdict and its number, or the reason why there is none and what to do.

    Exit code: 0 good, 1 a kernel is wrong, 2 it could not run, 3 a number was refused, a promise broken, or nothing was timed.

    \b
    Examples:
      flashmoe prove
      flashmoe prove documents long --budget 10m
      flashmoe prove long --draw 20
      flashmoe prove "attn b1 h16 q4096 d128 bf16" --against sdpa --against fa3
      flashmoe prove my_module:my_attention --against sdpa
      flashmoe prove examples/row_softmax.py:row_softmax --quick
      CUDA_VISIBLE_DEVICES=1 flashmoe prove train --shard 2/4
      flashmoe prove --resume reports/20260102-030405-a1b2c3
      torchrun --nproc-per-node 2 -m flashmoe_science prove context experts
    """
    from flashmoe_science.measure.request import Request
    from flashmoe_science.measure.run import Plan
    from flashmoe_science.measure.world.ranks import world_size
    from flashmoe_science.measure.world.run import WorldPlan

    price, asked = price_per_hour(), context.params
    folder, earlier = resume, None
    if resume is not None:
        earlier, given = earlier_of(context, resume, _WITH_RESUME)
        asked = given | {"budget": budget or given["budget"]}
    request = Request(
        targets=tuple(asked["targets"] or ()),
        kernel=tuple(asked["kernel"] or ()),
        against=tuple(asked["against"] or ()),
        shard=None if asked["shard"] is None else shard_of(asked["shard"]),
        watchdog_s=asked["watchdog"],
        budget_s=None if asked["budget"] is None else seconds_of_budget(asked["budget"]),
        price=price,
        command=("flashmoe", *sys.argv[1:]),
        **{name: asked[name] for name in _PASSED_ON},
    )
    plan = WorldPlan(request) if world_size() > 1 else Plan(request)
    if not plan.writes:  # rank 0 does, and judges: torchrun would end it if this rank ended with another code
        plan.run(Path(), lambda *words: None)
        return ExitCode.GOOD
    folder = folder or _folder(out)
    with Screen() as screen:
        try:
            outcomes = plan.run(folder, screen.watch, *filter(None, (earlier,)))
        except KeyboardInterrupt:
            typer.echo(f"the rows so far are in {folder}; to go on: flashmoe prove --resume {folder}", err=True)
            raise
        screen.watch("judging")
        judged = judge(folder)
    verdicts = standing(judged)
    code = worst([code_of(verdicts), *(outcome.exit_code for outcome in outcomes)])
    if as_json:
        extra = {"verdicts": [verdict.as_dict() for verdict in verdicts], "cost": cost_line([one.run for one in judged])}
        typer.echo(json.dumps({"exit_code": code, "folder": str(folder), **_found(outcomes), **extra}, indent=2))
    else:
        _print(code, folder, judged, verdicts, outcomes, plan.found)
    return code


def judge(folder: Path) -> list[JudgedRun]:
    """Judge the runs in ``folder`` and write a report into it. Raises StoreError."""
    if not folder.is_dir():
        raise ValueError(f"the records are gone: something removed {str(folder)!r} while the run was on")
    judged = [JudgedRun(run) for run in runs_under(folder)]
    write_report(judged, folder)
    return judged


def _folder(out: Path | None) -> Path:
    """The folder of this run, made. Raises ValueError: it cannot be made or written."""
    if out is not None and str(out) in ("", "."):
        raise ValueError("--out is empty, or the current folder; give a folder for the records and the report")
    folder = out if out is not None else Path("reports") / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    try:
        folder.mkdir(parents=True, exist_ok=out is not None)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--out is {str(folder)!r}, which cannot be written: {error.strerror}; give another folder") from error
    return folder


def _found(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The sums of the outcomes of all stages."""
    lists = ("wrong", "codes", "untrustworthy", "peers_refused")
    every = {name: [reason for outcome in outcomes for reason in getattr(outcome, name)] for name in lists}
    return {
        "checked": sum(outcome.checked for outcome in outcomes),
        "timed": sum(outcome.timed for outcome in outcomes),
        **every,
        "codes": list(dict.fromkeys(every["codes"])),
        "stopped": [outcome.stopped for outcome in outcomes if outcome.stopped],
    }


def _print(
    code: ExitCode,
    folder: Path,
    judged: Sequence[JudgedRun],
    verdicts: Sequence[Verdict],
    outcomes: Sequence[Outcome],
    built: Sequence[str],
) -> None:
    """The verdict with its number, or why there is none; the rows; what was found wrong or refused; the result in a line."""
    out, runs, found = console(), [one.run for one in judged], _found(outcomes)
    left = sum(outcome.problems_left for outcome in outcomes)
    rest = f"{count(left, 'problem')} not measured, the budget is spent; to go on: flashmoe prove --resume {folder}"
    unmeasured = left_out(runs)
    nobody = [*chain(*unmeasured.values()), "nothing was compared; name another rival with --against"]
    why = "; ".join(found["stopped"] or ([rest] if left else built) or nobody)
    found["left_out"] = (
        [text for name, texts in unmeasured.items() if is_brought(name, None) for text in texts] if verdicts else []
    )
    for text in first_lines(runs, verdicts) or [f"{code.word}: {why}"]:
        print_wrapped(out, text)
    if len(verdicts) <= _FEW or any(row.brought for row in verdicts):
        print_verdicts(out, verdicts)
    for text in (cost_line(runs), *built):
        print_wrapped(out, text)
    shown = tuple(filter(None, ((row.reason or "").partition(": ")[2] for row in verdicts)))  # a reason begins with its stage
    for name, label in _LABELS.items():
        reasons = [one for one in found[name] if not one.endswith(shown)]
        for reason in reasons[:_MAX_REASONS]:
            print_wrapped(out, f"{label}: {reason}")
        if len(reasons) > _MAX_REASONS:
            print_wrapped(out, f"{label}: {len(reasons) - _MAX_REASONS} more, which are in the report")
    if left and verdicts:
        print_wrapped(out, rest)
    print_wrapped(out, f"{_ending(code, found, left, bool(outcomes))}; records and report in {folder}")


def _ending(code: ExitCode, found: dict[str, Any], left: int, has_run: bool) -> str:
    """The last line: the result by its exit code, and the numbers of results and comparisons."""
    if not has_run:
        return f"{code.word}: nothing was left to measure"
    refused = len(found["peers_refused"])
    but = f"good, but for {count(refused, 'refused number')} of peers" if refused else "all good"
    words = code.word if code else "good as far as it went" if left else but
    return f"{words}: {count(found['checked'], 'result')} held to the oracle, {count(found['timed'], 'comparison')} timed"
