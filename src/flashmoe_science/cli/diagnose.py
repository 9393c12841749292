"""``flashmoe diagnose``: why is a kernel not faster, what would change that, and what did earlier changes give?"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashmoe_science.cli.evidence import DEFAULT, Evidence, machine_named, runs_under

if TYPE_CHECKING:
    from flashmoe_science.judge.diagnose.diagnosis import Diagnosis
    from flashmoe_science.measure.bench import Bench
    from flashmoe_science.measure.profile.profile import Subject
    from flashmoe_science.store import Run

GOOD, WRONG, COULD_NOT_RUN = 0, 1, 2


def diagnose(
    problems: Annotated[list[str], typer.Argument(metavar="PROBLEM", help="Texts of problems, or names of suites.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects, one a diagnosis.")] = False,
) -> int:
    """Say what the time of a kernel goes into, which changes that calls for, and what each can give at the most.

    On a GPU it looks at one call: what was launched, its time on both clocks, what the machine can do at most, and Nsight
    Compute's counters, whose reports (*.ncu-rep) are kept beside the records. Without a GPU, or with --recorded, the records
    alone are used. Each cause is supported, ruled out or untested, with its numbers; where there are no counters, the launch
    and the clocks decide what they can. A change that speeds a part p of the time up s times gives 1/((1-p) + p/s); several
    together never pass the machine's ceiling.

    Where an earlier run measured the kernel with other source, the changes whose cause is gone since stand beside what was
    gained. A kernel is a name, or module:function or file.py:function for one of your own.

    Exit code: 0 diagnosed, 1 a kernel does not run, 2 it could not run.

    \b
    Examples:
      flashmoe diagnose "attn b1 h16 q4096 d128 bf16 causal"
      flashmoe diagnose "attn b1 h1 q512 d64 fp16" --kernel examples/v1_attention.py:attention --kernel sdpa
      flashmoe diagnose "attn b1 h1 q512 d64 fp16" --kernel fwd_triton --gpu h200
    """
    if gpu is not None and measure:
        raise ValueError(f"--gpu is {gpu!r} with --measure; a kernel is measured on the machine here")
    if measure or (measure is None and gpu is None and _gpu_here()):
        recorded = runs_under(evidence) if evidence.is_dir() else []
        runs, found = _by_measuring(problems, kernel or [], config, out, recorded, quiet=as_json)
    else:
        runs = runs_under(evidence)
        found = _by_records(runs, problems, kernel or [], config, gpu)
    if as_json:
        typer.echo(json.dumps([_as_dict(one, runs) for one in found], indent=1))
    else:
        _print(found, runs)
    if not found:
        return COULD_NOT_RUN
    return WRONG if any(one.time_ns is None and one.facts.refusals for one in found) else GOOD


def _gpu_here() -> bool:
    from flashmoe_science.hardware.probe import current_gpu

    return current_gpu() is not None


def _by_records(
    runs: Sequence[Run], problems: Sequence[str], kernels: Sequence[str], config: str | None, gpu: str | None
) -> list[Diagnosis]:
    from flashmoe_science.judge.diagnose.diagnosis import diagnose as diagnosed

    if not kernels:
        raise ValueError("from the records, a diagnosis needs --kernel: it is of a kernel on a problem")
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
    from flashmoe_science.measure.profile.profile import SUITE, run_profile
    from flashmoe_science.measure.request import Request
    from flashmoe_science.measure.session import Session
    from flashmoe_science.store import RunWriter, read_run

    bench = bench_here()
    subjects = _subjects(bench, words, kernels, config)
    folder = out or Path("reports") / f"profile-{datetime.now():%Y%m%d-%H%M%S}"
    path = folder / f"run-{SUITE}.jsonl"
    request = Request(quick=True, command=("flashmoe", *sys.argv[1:]))
    with Screen() as screen, RunWriter(path) as writer:
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


def _as_dict(diagnosis: Diagnosis, runs: Sequence[Run]) -> dict[str, Any]:
    from flashmoe_science.judge.diagnose.plan import outcomes, plan

    gave = [asdict(one) for one in outcomes(diagnosis, runs)]
    return diagnosis.as_dict() | {"plan": plan(diagnosis).as_dict(), "outcomes": gave}


def _print(found: Sequence[Diagnosis], runs: Sequence[Run]) -> None:
    from flashmoe_science.cli.sheet import console, print_block
    from flashmoe_science.judge.diagnose.plan import outcomes
    from flashmoe_science.judge.report.tables import diagnosis_blocks

    out = console()
    for one in found:
        for block in diagnosis_blocks(one, outcomes(one, runs)):
            print_block(out, block)
        out.print()
