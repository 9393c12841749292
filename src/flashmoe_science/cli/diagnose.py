"""``flashmoe diagnose``: why is a kernel not faster, what would change that, and what did earlier predictions come to?"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashmoe_science.cli.evidence import DEFAULT, Evidence, machine_named, runs_under

if TYPE_CHECKING:
    from flashmoe_science.judge.diagnose.diagnosis import Diagnosis
    from flashmoe_science.judge.diagnose.plan import Step
    from flashmoe_science.judge.diagnose.predictions import Outcome
    from flashmoe_science.measure.bench import Bench
    from flashmoe_science.measure.profile.profile import Subject
    from flashmoe_science.store import Run

GOOD, WRONG, COULD_NOT_RUN = 0, 1, 2
PREDICTIONS = "plan"  # the suite of a run that holds predictions


def diagnose(
    problems: Annotated[
        list[str] | None, typer.Argument(metavar="PROBLEM", help="Texts of problems, or names of suites.")
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", help="A kernel, may be repeated; by default the one that the library would choose."),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help='Its config, such as "block_m=64 num_warps=4".')] = None,
    measure: Annotated[
        bool | None, typer.Option("--measure/--recorded", help="Run it here, or use the records alone (measure on a GPU).")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="From the records of this GPU, or cpu (the latest).")] = None,
    evidence: Evidence = DEFAULT,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for what is measured (reports/profile-<time>).")] = None,
    record: Annotated[bool, typer.Option("--record", help="Write the plan's gains down, before the change is made.")] = False,
    change: Annotated[
        list[str] | None, typer.Option("--change", metavar="KEY", help="With --record, only this change; may be repeated.")
    ] = None,
    made_in: Annotated[
        str | None, typer.Option("--in", metavar="KERNEL", help="With --record, the kernel that will hold the change.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects, one a diagnosis.")] = False,
) -> int:
    """Say what the time of a kernel goes into, which changes that calls for, and what each can give at the most.

    On a GPU it looks at one call: what was launched, its time on both clocks, what the machine can do at most, and Nsight
    Compute's counters, whose reports (*.ncu-rep) are kept beside the records. Without a GPU, or with --recorded, the records
    alone are used. Each cause is supported, ruled out or untested, with its numbers; where there are no counters, the launch
    and the clocks decide what they can. A change that speeds a part p of the time up s times gives 1/((1-p) + p/s); several
    together never pass the machine's ceiling.

    With --record the gains are written down as predictions; a later run of the changed kernel shows what they came to, here
    and in the report. Without a problem, the records' predictions are listed. A kernel is a name, or module:function or
    file.py:function for one of your own.

    Exit code: 0 diagnosed, 1 a kernel does not run, 2 it could not run.

    \b
    Examples:
      flashmoe diagnose "attn b1 h16 q4096 d128 bf16 causal"
      flashmoe diagnose "attn b1 h1 q512 d64 fp16" --kernel examples/v1_attention.py:attention --kernel sdpa
      flashmoe diagnose "attn b1 h1 q512 d64 fp16" --kernel fwd_triton --gpu h200
      flashmoe diagnose "attn b1 h1 q512 d64 fp16" --kernel fwd_triton --record --change serial-loop
    """
    from flashmoe_science.judge.diagnose.predictions import outcomes

    _check(gpu, measure, record, kernel, change, made_in, problems)
    here = _measures_here(measure, gpu, record)
    if not problems and not kernel:
        return _show_predictions(runs_under(evidence), as_json)
    if not problems:
        raise ValueError("--kernel is given without a problem; a diagnosis is of a kernel on a problem")
    if here:
        recorded = runs_under(evidence) if evidence.is_dir() else []
        runs, found = _by_measuring(problems or [], kernel or [], config, out, recorded, quiet=as_json)
    else:
        runs = runs_under(evidence)
        found = _by_records(runs, problems or [], kernel or [], config, gpu)
    if record:
        _record(evidence, found, change or [], made_in)
    predicted = outcomes(runs)
    if as_json:
        typer.echo(json.dumps([_as_dict(one, predicted) for one in found], indent=1))
    else:
        _print(found, predicted)
    if not found:
        return COULD_NOT_RUN
    return WRONG if any(one.time_ns is None and one.facts.refusals for one in found) else GOOD


def _check(
    gpu: str | None, measure: bool | None, record: bool, kernels: Sequence[str] | None,
    change: Sequence[str] | None, made_in: str | None, problems: Sequence[str] | None,
) -> None:  # fmt: skip
    """Refuse options that do not go together, before anything is read or run."""
    if gpu is not None and measure:
        raise ValueError(f"--gpu is {gpu!r} with --measure; a kernel is measured on the machine here")
    if record and measure:
        raise ValueError("--record is given with --measure; a prediction is made from the records of a run that is kept")
    if (change or made_in is not None) and not record:
        raise ValueError("--change and --in are given without --record; they say what is recorded, and where it will be made")
    if record and (not problems or not kernels or len(kernels) != 1):
        raise ValueError("--record needs a problem and one --kernel: a prediction is of a kernel on a problem")
    if made_in is not None and (not made_in.strip() or made_in in (kernels or ())):
        raise ValueError(f"--in is {made_in!r}; it must name another kernel than --kernel, or be left out")


def _measures_here(measure: bool | None, gpu: str | None, record: bool) -> bool:
    if measure is not None:
        return measure
    if gpu is not None or record:
        return False
    from flashmoe_science.hardware.probe import current_gpu

    return current_gpu() is not None


def _by_records(
    runs: Sequence[Run], problems: Sequence[str], kernels: Sequence[str], config: str | None, gpu: str | None
) -> list[Diagnosis]:
    from flashmoe_science.judge.diagnose.diagnosis import diagnose as diagnosed

    if not problems or not kernels:
        raise ValueError("from the records, a diagnosis needs a problem and --kernel: it is of a kernel on a problem")
    machine = machine_named(gpu, runs)
    return [diagnosed(runs, problem, kernel, config, machine) for problem in problems for kernel in kernels]


def _by_measuring(
    words: Sequence[str], kernels: Sequence[str], config: str | None, out: Path | None, recorded: Sequence[Run], quiet: bool
) -> tuple[list[Run], list[Diagnosis]]:
    """The records with the new run among them (they know other sizes, and rivals), and a diagnosis of each kernel."""
    from flashmoe_science.cli.progress import Screen
    from flashmoe_science.judge.diagnose.diagnosis import diagnose as diagnosed
    from flashmoe_science.judge.diagnose.facts import NothingKnown
    from flashmoe_science.judge.trust import gpu_name
    from flashmoe_science.measure.bench import bench_here
    from flashmoe_science.measure.device_lock import alone_on
    from flashmoe_science.measure.profile.profile import SUITE, run_profile
    from flashmoe_science.measure.request import Request
    from flashmoe_science.measure.session import Session
    from flashmoe_science.store import RunWriter, read_run

    bench = bench_here()
    subjects = _subjects(bench, words, kernels, config)
    folder = out or Path("reports") / f"profile-{datetime.now():%Y%m%d-%H%M%S}"
    path = folder / f"run-{SUITE}.jsonl"
    request = Request(quick=True, command=("flashmoe", *sys.argv[1:]))
    with Screen() as screen, alone_on(bench.device, screen.watch), RunWriter(path) as writer:
        run_profile(Session(bench, writer, request, screen.watch), subjects, folder)
    run = read_run(path)
    if not quiet:
        typer.echo(f"records and reports in {folder}")
    machine = gpu_name(run.header.environment)
    runs = [run, *(other for other in recorded if other.header.run != run.header.run)]
    found = []
    for one in subjects:
        try:
            found.append(diagnosed(runs, str(one.problem), one.entry.name, one.entry.config, machine))
        except NothingKnown as error:
            typer.echo(f"flashmoe: {error}", err=True)
    return runs, found


def _subjects(bench: Bench, words: Sequence[str], kernels: Sequence[str], config: str | None) -> list[Subject]:
    """Each kernel on each problem. Raises ValueError, in one line, for whatever cannot be looked at here."""
    from flashmoe_science.measure.profile.profile import default_kernel, subject
    from flashmoe_science.measure.request import Request, groups

    named = [problem for group in groups(Request(targets=tuple(words)), bench.gpu) for problem in group.problems]
    if config is not None and len(kernels) != 1:
        raise ValueError(f"--config is {config!r}; it needs one --kernel, whose config it is")
    return [subject(who, one, config, bench) for one in named for who in kernels or [default_kernel(one, bench)]]


def _steps(diagnosis: Diagnosis, change: Sequence[str]) -> list[Step]:
    """The plan's steps, or those of the changes named. Raises ValueError for a change that the plan lacks."""
    from flashmoe_science.judge.diagnose.plan import plan

    steps = plan(diagnosis).steps
    known = [step.hypothesis for step in steps]
    for key in change:
        if key not in known:
            raise ValueError(f"--change is {key!r}; the plan has {', '.join(known) or 'no changes'}")
    return [step for step in steps if not change or step.hypothesis in change]


def _record(folder: Path, found: Sequence[Diagnosis], change: Sequence[str], made_in: str | None) -> None:
    """Write the plan's gains as a run of their own, beside the others of that machine."""
    steps = [(one, step) for one in found for step in _steps(one, change)]
    if not steps:
        raise ValueError("--record is given, and the plan has no change to predict anything of")
    from flashmoe_science.judge.diagnose.predictions import prediction
    from flashmoe_science.measure.bench import bench_here
    from flashmoe_science.measure.recorder import Recorder, new_run_id
    from flashmoe_science.store import RunWriter

    run = new_run_id()
    under = folder / "runs" if (folder / "runs").is_dir() else folder
    path = under / found[0].facts.machine / f"{run}-{PREDICTIONS}.jsonl"
    with RunWriter(path) as writer:
        recorder = Recorder(writer, run)
        recorder.begin(bench_here(), PREDICTIONS, ("flashmoe", *sys.argv[1:]), 0)
        for one, step in steps:
            recorder.add(prediction(run, one, step, made_in, datetime.now(UTC)))
        recorder.end(code=GOOD)
    typer.echo(f"recorded in {path}", err=True)


def _show_predictions(runs: Sequence[Run], as_json: bool) -> int:
    from flashmoe_science.cli.sheet import console, print_block
    from flashmoe_science.judge.diagnose.predictions import outcomes
    from flashmoe_science.judge.report.tables import prediction_table

    found = outcomes(runs)
    if as_json:
        typer.echo(json.dumps([one.as_dict() for one in found], indent=1))
    elif found:
        print_block(console(), prediction_table(found))
    else:
        typer.echo("no predictions are on record; flashmoe diagnose PROBLEM --kernel KERNEL --record makes some")
    return GOOD


def _of(diagnosis: Diagnosis, predicted: Sequence[Outcome]) -> list[Outcome]:
    """The predictions about the kernel on the problem, or about the version of it that holds a change."""
    about = (diagnosis.problem, diagnosis.facts.machine)
    return [
        one
        for one in predicted
        if (one.prediction.problem, one.prediction.gpu) == about
        and diagnosis.kernel in (one.prediction.kernel, one.prediction.made_in)
    ]


def _as_dict(diagnosis: Diagnosis, predicted: Sequence[Outcome]) -> dict[str, Any]:
    from flashmoe_science.judge.diagnose.plan import plan

    predictions = [one.as_dict() for one in _of(diagnosis, predicted)]
    return diagnosis.as_dict() | {"plan": plan(diagnosis).as_dict(), "predictions": predictions}


def _print(found: Sequence[Diagnosis], predicted: Sequence[Outcome]) -> None:
    from flashmoe_science.cli.sheet import console, print_block
    from flashmoe_science.judge.report.tables import diagnosis_blocks, prediction_table

    out = console()
    for one in found:
        for block in diagnosis_blocks(one):
            print_block(out, block)
        if about := _of(one, predicted):
            print_block(out, prediction_table(about))
        out.print()
