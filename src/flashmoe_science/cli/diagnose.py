"""``flashmoe diagnose``: why is a kernel not faster, what would change that, and what did earlier changes give?"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from flashmoe_science.cli.evidence import DEFAULT, Evidence, machine_named, runs_under
from flashmoe_science.cli.progress import Screen
from flashmoe_science.cli.sheet import console, print_block
from flashmoe_science.exit_codes import ExitCode
from flashmoe_science.hardware import probe
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.judge.diagnose import diagnosis
from flashmoe_science.judge.diagnose.facts import NoRecord
from flashmoe_science.judge.report.tables import diagnosis_blocks
from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.problem import Problem
from flashmoe_science.records import TimingRow
from flashmoe_science.store import Run, RunWriter, read_run


def diagnose(
    problems: Annotated[list[str], typer.Argument(metavar="PROBLEM", help="Texts of problems, or names of suites.")],
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", help="A kernel, may be repeated; by default the one that the library would choose."),
    ] = None,
    measure: Annotated[
        bool | None, typer.Option("--measure/--recorded", help="Measure here, or only read records (on a GPU: measure).")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Use records of this GPU, or cpu (the latest).")] = None,
    evidence: Evidence = DEFAULT,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the new records (reports/profile-<time>).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects, one a diagnosis.")] = False,
) -> int:
    """Say where a kernel's time goes, which changes would help, and how much each can give at most.

    On a GPU one call is measured: its launches, its time on both clocks, the limits of the machine, and Nsight Compute's
    counters, whose reports (*.ncu-rep) are kept beside the records. Without a GPU, or with --recorded, only the records are
    used; a function of yours without records is measured here. Each cause is supported, ruled out or untested, with its
    numbers. Without counters, the launches and the clocks decide what they can. A change that speeds a part p of the time up
    s times gives 1/((1-p) + p/s); several changes together never pass the machine's ceiling.

    If an earlier run measured the kernel with other source, the causes that are gone since are listed with the gain. A kernel
    is a name, or module:function or file.py:function for one of your own.

    Exit code: 0 diagnosed, 1 a kernel does not run, 2 it could not run.

    \b
    Examples:
      flashmoe diagnose "attn b4 h16 q4096 d128 bf16 causal bshd"
      flashmoe diagnose decode-paged --kernel decode_gluon
      flashmoe diagnose "attn b1 h1 q512 d64 fp16" --kernel fwd_triton --gpu h200
    """
    if gpu is not None and measure:
        raise ValueError(f"--gpu is {gpu!r} with --measure; a kernel is measured on the machine here")
    recorded = runs_under(evidence) if evidence.is_dir() else []
    here = measure is None and gpu is None and (probe.current_gpu() is not None or _are_new(kernel or (), recorded))
    if measure or here:
        run, wanted = _measure(problems, kernel or [], out)
        runs = [run, *(other for other in recorded if other.header.run != run.header.run)]  # they know other sizes, and rivals
        machine: str | None = gpu_name(run.header.environment)
    else:
        runs = recorded or runs_under(evidence)
        machine = machine_named(gpu, [gpu_name(run.header.environment) for run in runs])
        wanted = _on_record(problems, kernel or [], machine, runs)
    found, unknown = list[diagnosis.Diagnosis](), list[str]()
    for problem, name in wanted:
        try:
            found.append(diagnosis.diagnose(runs, problem, name, machine))
        except NoRecord as error:
            unknown.append(str(error))
    if unknown and not found:
        raise ValueError(f"{unknown[0]}; to measure it here: --measure")
    for words in unknown:
        typer.echo(f"left out: {words}", err=True)
    if as_json:
        gave = [(one, diagnosis.gained(one, runs)) for one in found]
        typer.echo(json.dumps([one.as_dict() | {"gained": what and what.as_dict()} for one, what in gave], indent=1))
    else:
        screen = console()
        for one in found:
            for block in diagnosis_blocks(one, diagnosis.gained(one, runs)):
                print_block(screen, block)
            screen.print()
    return ExitCode.WRONG if any(one.facts.time_ns is None and one.facts.refusals for one in found) else ExitCode.GOOD


def _are_new(kernels: Sequence[str], runs: Sequence[Run]) -> bool:
    """Whether these are a user's functions that no run has measured."""
    recorded = {getattr(row, "kernel", None) for run in runs for row in run.rows}
    return bool(kernels) and all(":" in one and one not in recorded for one in kernels)


def _on_record(words: Sequence[str], kernels: Sequence[str], machine: str | None, runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Each problem with a kernel: by default the one that the library would choose on the machine, or on that of the latest run
    that timed the problem. Raises ValueError, in one line: a word that is no problem and no suite."""
    from flashmoe_science.measure.request import Request, default_kernel, named_groups

    def chosen(problem: Problem) -> str:
        timed = (run for run in runs if any(isinstance(row, TimingRow) and row.problem == str(problem) for row in run.rows))
        latest = max(timed, key=lambda run: run.header.started, default=None)
        if machine is None and latest is None:
            raise ValueError(f"no record has '{problem}'; to measure it here: --measure, with a --kernel")
        name = gpu_name(latest.header.environment) if machine is None and latest else machine or "cpu"
        return default_kernel(problem, None if name == "cpu" else gpu_named(name))

    named = [problem for group in named_groups(Request(targets=tuple(words))) for problem in group.problems]
    return [(str(one), kernel) for one in named for kernel in kernels or [chosen(one)]]


def _measure(words: Sequence[str], kernels: Sequence[str], out: Path | None) -> tuple[Run, list[tuple[str, str]]]:
    """Measure each kernel on each problem here. Returns the run, and each problem with a kernel. Raises ValueError, in one
    line, for whatever cannot be measured here."""
    from flashmoe_science.measure.bench import bench_here
    from flashmoe_science.measure.profile.profile import SUITE, run_profile, subject
    from flashmoe_science.measure.request import Request, default_kernel, groups
    from flashmoe_science.measure.session import Session

    bench = bench_here()
    named = [problem for group in groups(Request(targets=tuple(words)), bench.gpu) for problem in group.problems]
    subjects = [subject(who, one, bench) for one in named for who in kernels or [default_kernel(one, bench.gpu)]]
    folder = out or Path("reports") / f"profile-{datetime.now():%Y%m%d-%H%M%S}"
    path = folder / f"run-{SUITE}.jsonl"
    request = Request(quick=True, command=("flashmoe", *sys.argv[1:]))
    with Screen() as screen, RunWriter(path) as writer:
        run_profile(Session(bench, writer, request, screen.watch), subjects, folder)
    typer.echo(f"records and reports in {folder}", err=True)
    return read_run(path), [(str(one.problem), one.entry.name) for one in subjects]
