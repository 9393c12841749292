"""``flashmoe prove``: measure, judge, report; or, where there is no GPU, all of that which needs none."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flashmoe_science.cli.asked import Asked
    from flashmoe_science.cli.candidates import Brought
    from flashmoe_science.cli.judgement import Judgement
    from flashmoe_science.cli.progress import Screen
    from flashmoe_science.measure.session import Outcome

GOOD, WRONG, COULD_NOT_RUN, UNTRUSTWORTHY = 0, 1, 2, 3  # as measure.ledger has them, which imports PyTorch
_WORST_FIRST = (WRONG, COULD_NOT_RUN, UNTRUSTWORTHY, GOOD)


def prove(
    context: typer.Context,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CANDIDATE|SUITE|PROBLEM",
            help="module:function or file.py:function of your own; documents, long, quick, cpu, or the text of a problem.",
        ),
    ] = None,
    kernel: Annotated[str | None, typer.Option("--kernel", help="Put one kernel on trial in place of all of ours.")] = None,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", metavar="KERNEL", help='A rival (or a candidate), may be repeated; "all" is every peer.'),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PROBLEM", help="Of the suites named, only this problem; may be repeated."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples, configs and cases.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every config and every peer.")] = False,
    configs: Annotated[
        int | None, typer.Option("--configs", min=1, help="How many configs of a kernel to try (4; 1 with --quick).")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for records and report (reports/<time>-<id>).")] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="FOLDER|FILE", help="Go on with a run that was cut, with the options it was given."),
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Time beside another run on this GPU, which disturbs both, in place of waiting.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="600|5m|2usd", help="Stop in time with what there is: seconds, 5m, 1h or 2usd."),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price", metavar="USD_PER_HOUR", help="Of this machine, for the record (else FLASHMOE_PRICE_PER_HOUR)."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the inputs.")] = 42,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Calls of a candidate compared bit by bit (10; 3 with --quick).")
    ] = None,
    watchdog: Annotated[float, typer.Option("--watchdog", help="Seconds that a candidate may take over one step.")] = 60.0,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Look at one call of a candidate with compute-sanitizer too (on a GPU).")
    ] = False,
    warm: Annotated[
        bool, typer.Option("--warm", help="Time with the L2 cache warm too, beside the cold rows (on a GPU).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> int:
    """Prove the kernels: call path, correctness, speed on two clocks against the best rivals, verdicts and a report.

    Without a GPU: every kernel built for GPUs that are not here and interpreted against the fp64 oracle, PyTorch's attention
    timed on the CPU, and the committed records judged again.

    Each row is on disk as it comes. A run that was killed, or whose budget was spent, goes on with --resume: problems that it
    finished are kept, the one that it was in is measured again.

    A kernel of your own, module:function or file.py:function, is held to the attention contract fn(q, k, v, causal=False,
    softmax_scale=None), or to the contract that it names (flashmoe_science.contract). It runs in a process of its own: a crash,
    a hang or an exit is recorded, and the rest goes on.

    Exit code: 0 all good, 1 a kernel is wrong or a claim fails, 2 it could not run, 3 refused as untrustworthy.

    \b
    Examples:
      flashmoe prove
      flashmoe prove documents long --budget 10m
      flashmoe prove documents --budget 2usd --price 3.50
      flashmoe prove documents --only "attn b1 h1 q192 d64 fp16"
      flashmoe prove "attn b1 h16 q4096 d128 bf16 causal" --against sdpa --against fa3
      flashmoe prove my_module:my_attention --against sdpa
      flashmoe prove my_module:my_attention --sanitize
      flashmoe prove examples/row_softmax.py:row_softmax examples/cpu_attention.py:attention --quick
      flashmoe prove --resume reports/20260102-030405-a1b2c3
    """
    from flashmoe_science.cli.asked import Asked, Request, resumed
    from flashmoe_science.cli.budget import price_or_default, seconds_of_budget
    from flashmoe_science.cli.candidates import Brought, candidates_among
    from flashmoe_science.cli.progress import Screen
    from flashmoe_science.measure.price import set_price

    request = Request(
        tuple(targets or ()),
        kernel,
        tuple(against or ()),
        quick,
        full,
        configs,
        None if budget is None else seconds_of_budget(budget, price_or_default(price)),
        seed,
        warm,
        tuple(only or ()),
        ("flashmoe", *sys.argv[1:]),
        repeats,
        watchdog,
        sanitize,
    )
    folder = None
    if resume is not None:
        folder, request = resumed(context, resume, request.budget)
    set_price(price)
    brought, going_on = candidates_among(request.targets), resume is not None
    asked = Brought(request, brought, going_on) if brought else Asked(request, going_on)
    folder = folder or _folder(out)
    with Screen() as screen:
        outcomes = _measured(asked, folder, screen, share)
        screen.stage("judging")
        judgement = _judged(folder)
    # The committed claims are about our kernels: whether they hold is shown beside a candidate, and is not its fault.
    code = _code(outcomes, replace(judgement, claims=()) if brought else judgement)
    if as_json:
        typer.echo(json.dumps(_as_dict(code, folder, outcomes, judgement), indent=2))
    else:
        judgement.print()
        _print_outcomes(code, folder, outcomes, judgement)
    return code


def _measured(asked: Asked | Brought, folder: Path, screen: Screen, share: bool) -> list[Outcome]:
    """Measure when the device is free. Where the records cannot be written any more, what there is is still reported.

    Raises:
        StoreError, DeviceBusy, CannotResume: in one line.
    """
    from flashmoe_science.measure.turn import device_name, turn
    from flashmoe_science.store import StoreError

    try:
        with turn(device_name(asked.bench.device), share, screen.stage) as beside:
            return asked.run(folder, screen, beside)
    except KeyboardInterrupt:
        typer.echo(f"the rows so far are in {folder}; to go on: flashmoe prove --resume {folder}", err=True)
        raise
    except StoreError:
        with suppress(OSError, ValueError):
            _judged(folder)
        raise


def _judged(folder: Path) -> Judgement:
    from flashmoe_science.cli.judgement import judge_and_report

    if not folder.is_dir():
        raise ValueError(f"the records are gone: something removed {str(folder)!r} while the run was on")
    return judge_and_report(folder)


def _folder(out: Path | None) -> Path:
    """The folder of this run, made and writable.

    Raises:
        ValueError: it cannot be made or written.
    """
    folder = out if out is not None else Path("reports") / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    try:
        folder.mkdir(parents=True, exist_ok=out is not None)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--out is {str(folder)!r}, which cannot be written: {error.strerror}; give another folder") from error
    return folder


def _code(outcomes: list[Outcome], judgement: Judgement) -> int:
    codes = {outcome.exit_code for outcome in outcomes} | {judgement.exit_code}
    return next(code for code in _WORST_FIRST if code in codes)


def _as_dict(code: int, folder: Path, outcomes: list[Outcome], judgement: Judgement) -> dict[str, object]:
    return {
        "exit_code": code,
        "folder": str(folder),
        "checked": sum(outcome.checked for outcome in outcomes),
        "timed": sum(outcome.timed for outcome in outcomes),
        "wrong": [reason for outcome in outcomes for reason in outcome.wrong],
        "untrustworthy": [reason for outcome in outcomes for reason in outcome.untrustworthy],
        "stopped": [outcome.stopped for outcome in outcomes if outcome.stopped],
        **judgement.as_dict(),
    }


def _print_outcomes(code: int, folder: Path, outcomes: list[Outcome], judgement: Judgement) -> None:
    from flashmoe_science.cli.sheet import console, put_wrapped

    out = console()
    for outcome in outcomes:
        for reason in outcome.wrong:
            put_wrapped(out, f"wrong: {reason}")
        for reason in outcome.untrustworthy:
            put_wrapped(out, f"refused: {reason}")
        if outcome.stopped:
            put_wrapped(out, f"stopped: {outcome.stopped}")
    left = sum(outcome.problems_left for outcome in outcomes)
    if left:
        typer.echo(f"not measured: {left} problems (the budget is spent); to go on: flashmoe prove --resume {folder}")
    checked, timed = sum(outcome.checked for outcome in outcomes), sum(outcome.timed for outcome in outcomes)
    words = {
        GOOD: "all good",
        WRONG: "a kernel is wrong or a claim fails",
        COULD_NOT_RUN: "it could not run",
        UNTRUSTWORTHY: "refused as untrustworthy",
    }
    typer.echo(f"{words[code]}: {checked} results held to the oracle, {timed} pairs timed; records and report in {folder}")
