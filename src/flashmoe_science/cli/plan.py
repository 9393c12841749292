"""``flashmoe plan``: what would make a kernel faster, by how much at the most; and what earlier predictions came to."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashmoe_science.cli.evidence import DEFAULT, machine_named, runs_under

if TYPE_CHECKING:
    from flashmoe_science.cli.sheet import Line
    from flashmoe_science.judge.diagnosis import Diagnosis
    from flashmoe_science.judge.outcomes import Outcome
    from flashmoe_science.judge.plan import Plan, Step
    from flashmoe_science.records import PredictionRow
    from flashmoe_science.store import Run

SUITE = "plan"
_COLOURS = {"hit": "green", "missed": "red", "exceeded": "magenta", "not measured yet": "cyan"}


def plan(
    problem: Annotated[
        str | None, typer.Argument(metavar="PROBLEM", help="Text of a problem; without one, earlier predictions are shown.")
    ] = None,
    kernel: Annotated[str | None, typer.Option("--kernel", help="The kernel to make faster.")] = None,
    config: Annotated[str | None, typer.Option("--config", help="Its config; by default its fastest.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="By the records of this GPU, or cpu; by default the latest.")] = None,
    evidence: Annotated[
        list[Path] | None, typer.Option("--evidence", help="Folder with run records (evidence); may be repeated.")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Write the predictions down, before the change is made.")] = False,
    change: Annotated[
        list[str] | None, typer.Option("--change", metavar="KEY", help="Only this change, by its key; may be repeated.")
    ] = None,
    made_in: Annotated[
        str | None, typer.Option("--in", metavar="KERNEL", help="The kernel that will hold the change, if it is another.")
    ] = None,
    show_outcomes: Annotated[
        bool, typer.Option("--outcomes", help="Recorded predictions beside what was measured after them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """From a kernel's diagnosis, the changes it calls for, each with the most that it can give, by Amdahl's law.

    The diagnosis is that of flashmoe profile, from the records. A change that speeds a part p of the time up s times gives
    1/((1-p) + p/s); what several give together never passes the machine's ceiling. With --record the predictions are written
    down with the time they start from; a later run of the changed kernel shows, in flashmoe plan, which ones hit and by how
    much the others missed. Record the change that you are about to make (--change), so that it is the one that is tested; where
    the changed kernel has a name of its own, say so (--in).

    \b
    Examples:
      flashmoe plan "attn b1 h1 q512 d64 fp16" --kernel fwd_triton --gpu h200
      flashmoe plan "attn b1 h1 q512 d64 fp16" --kernel fwd_triton --record --change serial-loop
      flashmoe plan "attn b1 h1 q512 d64 fp16" --kernel mine.py:v1 --record --change small-grid --in mine.py:v2
      flashmoe plan
    """
    folders = evidence or [DEFAULT]
    runs = _runs(folders)
    if problem is None or show_outcomes:
        if record or change or made_in is not None:
            raise ValueError(
                "--record, --change and --in need a problem and --kernel: a prediction is of a kernel on a problem"
            )
        _show_outcomes(runs, problem, kernel, as_json)
        return
    if kernel is None:
        raise ValueError("--kernel is not given; name the kernel to make faster")
    if made_in is not None and not record:
        raise ValueError("--in is given without --record; it says where a recorded change will be made")
    if made_in is not None and (not made_in.strip() or made_in == kernel):
        raise ValueError(f"--in is {made_in!r}; it must name another kernel than --kernel, or be left out")
    diagnosis, made, chosen = _planned(runs, problem, kernel, config, gpu, change)
    if as_json:
        typer.echo(json.dumps(made.as_dict() | {"steps": [step.as_dict() for step in chosen]}, indent=1))
    else:
        _print_plan(diagnosis, made, chosen)
    if record:
        _record(folders[0], diagnosis, chosen, made_in)


def _runs(folders: Sequence[Path]) -> list[Run]:
    """Every run of the folders, each once."""
    found = {run.header.run: run for folder in folders for run in runs_under(folder)}
    return list(found.values())


def _planned(
    runs: Sequence[Run], problem: str, kernel: str, config: str | None, gpu: str | None, change: Sequence[str] | None
) -> tuple[Diagnosis, Plan, list[Step]]:
    from flashmoe_science.judge.diagnosis import diagnose
    from flashmoe_science.judge.plan import plan as plan_of

    machine = machine_named(gpu, runs)
    diagnosis = diagnose(runs, problem, kernel, config, machine)
    made = plan_of(diagnosis)
    known = [step.hypothesis for step in made.steps]
    for key in change or ():
        if key not in known:
            raise ValueError(f"--change is {key!r}; the plan has {', '.join(known) or 'no changes'}")
    return diagnosis, made, [step for step in made.steps if not change or step.hypothesis in change]


def _record(folder: Path, diagnosis: Diagnosis, steps: Sequence[Step], made_in: str | None) -> None:
    """A run of its own, beside the others of that machine."""
    from flashmoe_science.measure.bench import bench_here
    from flashmoe_science.measure.ledger import GOOD, Ledger
    from flashmoe_science.measure.session import begin, end, new_run_id
    from flashmoe_science.store import RunWriter

    if not steps:
        raise ValueError("--record is given, and the plan has no change to predict anything of")
    run = new_run_id()
    under = folder / "runs" if (folder / "runs").is_dir() else folder
    path = under / diagnosis.facts.machine / f"{run}-{SUITE}.jsonl"
    with RunWriter(path) as writer:
        ledger, began = Ledger(run, writer), time.monotonic()
        begin(ledger, bench_here(), SUITE, ("flashmoe", *sys.argv[1:]), 0)
        for step in steps:
            ledger.add(_prediction(run, diagnosis, step, made_in))
        end(ledger, began, GOOD)
    typer.echo(f"recorded in {path}", err=True)


def _prediction(run: str, diagnosis: Diagnosis, step: Step, made_in: str | None) -> PredictionRow:
    from flashmoe_science.records import PredictionRow

    before = diagnosis.facts.times.get(step.clock)
    if before is None:
        raise ValueError(f"'{step.change}' cannot be recorded: no time on the {step.clock} clock is on record to predict from")
    return PredictionRow(
        run=run,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        problem=diagnosis.problem,
        kernel=diagnosis.kernel,
        config=diagnosis.facts.config,
        gpu=diagnosis.facts.machine,
        clock=step.clock,
        change=step.change,
        hypothesis=step.hypothesis,
        most_gain=step.most_gain,
        cumulated=step.cumulated,
        part=step.part,
        speedup=None if isinf(step.speedup) else step.speedup,
        how=step.how,
        before_ns=before.time_ns,
        before_run=before.run,
        made_in=made_in,
    )


def _print_plan(diagnosis: Diagnosis, made: Plan, steps: Sequence[Step]) -> None:
    from rich.markup import escape

    from flashmoe_science.cli.causes import console
    from flashmoe_science.cli.sheet import Column, print_sheet

    screen = console()
    config = f" ({made.config})" if made.config else ""
    screen.print(f"[bold]{escape(made.kernel + config)}[/] on {escape(made.problem)}, {escape(made.machine)}")
    screen.print(escape(f"cause: {diagnosis.cause}"))
    if made.time_ns and made.least_ns:
        least = f"{made.least_ns / 1e3:.4g} us is the least that the binding ceiling lets it take ({made.limit})"
        screen.print(escape(f"{made.time_ns / 1e3:.4g} us; {least}"))
    if not steps:
        screen.print("no change is called for by what is on record")
        return
    columns = (
        Column("key"), Column("clock"), Column("part", right=True, spare=1), Column("of it", right=True, spare=2),
        Column("at most", right=True), Column("together", right=True),
    )  # fmt: skip
    print_sheet(screen, "changes", "change", columns, [_line(step) for step in steps])


def _line(step: Step) -> Line:
    from flashmoe_science.cli.sheet import Line

    faster = "removed" if isinf(step.speedup) else f"{step.speedup:.3g}x"
    together = f"{step.cumulated:.2f}x{' (the ceiling)' if step.capped else ''}"
    cells = (step.hypothesis, step.clock, f"{step.part:.0%}", faster, f"{step.most_gain:.2f}x", together)
    return Line(step.change, cells, below=step.how)


def _show_outcomes(runs: Sequence[Run], problem: str | None, kernel: str | None, as_json: bool) -> None:
    from flashmoe_science.judge.outcomes import outcomes
    from flashmoe_science.operations import parse_problem

    text = None if problem is None else str(parse_problem(problem))
    every = outcomes(runs)
    found = [one for one in every if text in (None, one.prediction.problem) and kernel in (None, one.prediction.kernel)]
    if as_json:
        typer.echo(json.dumps([one.as_dict() for one in found], indent=1))
    elif every and not found:
        typer.echo(f"of the predictions on record ({len(every)}) none is of that; flashmoe plan shows them all")
    elif not found:
        typer.echo("no predictions are on record; flashmoe plan PROBLEM --kernel KERNEL --record makes some")
    else:
        _print_outcomes(found)


def _print_outcomes(found: Sequence[Outcome]) -> None:
    from flashmoe_science.cli.causes import console
    from flashmoe_science.cli.sheet import Column, Line, print_sheet
    from flashmoe_science.judge.formats import within

    columns = (
        Column("made", spare=1), Column("key"), Column("predicted", right=True), Column("measured", right=True),
        Column("95% interval", spare=2), Column("outcome"),
    )  # fmt: skip
    lines = [
        Line(
            f"{row.kernel} -> {row.made_in}: {row.problem}" if row.made_in else f"{row.kernel}: {row.problem}",
            (
                row.made,
                row.hypothesis,
                f"{row.most_gain:.2f}x",
                "" if one.gain is None else f"{one.gain:.2f}x",
                within(one.low, one.high),
                one.said,
            ),
            ("", "", "", "", "", _COLOURS[one.said]),
            below=row.change if one.off_by is None else f"{row.change}: {_said(one)}",
        )
        for one in found
        for row in (one.prediction,)
    ]
    print_sheet(console(), "predictions", "kernel and problem", columns, lines)


def _said(one: Outcome) -> str:
    assert one.off_by is not None  # it was measured
    factor = one.off_by if one.off_by >= 1 else 1 / one.off_by
    by = "" if one.said == "hit" else f" by {factor:.2f}x"
    part = "" if one.part is None else f": it sped up {one.part:.0%} of the time, not {one.prediction.part or 0:.0%}"
    return f"{one.said}{by}{part} (run {one.run}, {one.how})"
