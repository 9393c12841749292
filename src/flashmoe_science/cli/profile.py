"""``flashmoe profile``: why is a kernel not faster? Counters where they may be read, the launch and the clocks where not."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashmoe_science.cli.evidence import DEFAULT, machine_named, runs_under

if TYPE_CHECKING:
    from flashmoe_science.judge.diagnosis import Diagnosis
    from flashmoe_science.measure.bench import Bench
    from flashmoe_science.measure.profile.profile import Subject
    from flashmoe_science.store import Run

GOOD, WRONG, COULD_NOT_RUN = 0, 1, 2


def profile(
    problems: Annotated[
        list[str] | None, typer.Argument(metavar="PROBLEM", help="Texts of problems, or names of suites; by default one.")
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", help="A kernel, may be repeated; by default the one that the library would choose."),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help='Its config, such as "block_m=64 num_warps=4".')] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for records and reports (reports/profile-<time>).")] = None,
    recorded: Annotated[bool, typer.Option("--recorded", help="Run nothing: diagnose by the records alone.")] = False,
    gpu: Annotated[str | None, typer.Option("--gpu", help="With --recorded, the records of this GPU.")] = None,
    evidence: Annotated[Path, typer.Option("--evidence", help="Folder with run records, read beside the new ones.")] = DEFAULT,
    ceilings: Annotated[bool, typer.Option("--ceilings/--no-ceilings", help="Measure what the machine can do.")] = True,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that Nsight Compute may take for a call.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects, one a diagnosis.")] = False,
) -> int:
    """Look at one call of a kernel and say what its time goes into: each cause supported, ruled out or untested.

    Records what the call launched, its time on both clocks, what the machine can do at most, and Nsight Compute's counters;
    the tool's reports (*.ncu-rep) are kept beside the records. Where ncu is missing or the driver keeps counters from
    users, it says so, and the launch and the clocks still decide what they can. On a CPU, times and ceilings do.

    A kernel is a name, or module:function or file.py:function for one of your own. Whether it is right, and faster than others,
    is for flashmoe prove.

    Exit code: 0 diagnosed, 1 a kernel does not run, 2 it could not run.

    \b
    Examples:
      flashmoe profile "attn b1 h16 q4096 d128 bf16 causal"
      flashmoe profile "attn b1 h1 q512 d64 fp16" --kernel examples/v1_attention.py:attention --kernel sdpa
      flashmoe profile "attn b1 h1 q512 d64 fp16" --kernel fwd_triton --recorded --gpu h200
    """
    if not timeout > 0:
        raise ValueError(f"--timeout is {timeout:g}; it must be more than 0 seconds")
    if gpu is not None and not recorded:
        raise ValueError(f"--gpu is {gpu!r} without --recorded; what is run is run on this machine")
    if recorded:
        found = _by_records(problems or [], kernel or [], config, gpu, evidence)
    else:
        found = _by_running(problems or [], kernel or [], config, out, evidence, ceilings, timeout, quiet=as_json)
    if as_json:
        typer.echo(json.dumps([one.as_dict() for one in found], indent=1))
    else:
        _print(found)
    if not found:
        return COULD_NOT_RUN
    return WRONG if any(one.time_ns is None and one.facts.refusals for one in found) else GOOD


def _by_records(
    problems: Sequence[str], kernels: Sequence[str], config: str | None, gpu: str | None, evidence: Path
) -> list[Diagnosis]:
    from flashmoe_science.judge.diagnosis import diagnose

    if not problems or not kernels:
        raise ValueError("--recorded needs a problem and --kernel: it diagnoses what records hold of a kernel on a problem")
    runs = runs_under(evidence)
    machine = machine_named(gpu, runs)
    return [diagnose(runs, problem, kernel, config, machine) for problem in problems for kernel in kernels]


def _by_running(
    words: Sequence[str], kernels: Sequence[str], config: str | None, out: Path | None, evidence: Path, ceilings: bool,
    timeout: float, quiet: bool,
) -> list[Diagnosis]:  # fmt: skip
    from flashmoe_science.cli.progress import Screen
    from flashmoe_science.judge.diagnosis import NothingKnown, diagnose
    from flashmoe_science.judge.trust import gpu_name
    from flashmoe_science.measure.bench import bench_here
    from flashmoe_science.measure.profile.profile import SUITE, ProfileOptions, run_profile
    from flashmoe_science.measure.turn import device_name, turn
    from flashmoe_science.store import RunWriter, read_run

    bench = bench_here()
    subjects = _subjects(bench, words, kernels, config)
    folder = out or Path("reports") / f"profile-{datetime.now():%Y%m%d-%H%M%S}"
    path = folder / f"run-{SUITE}.jsonl"
    options = ProfileOptions(tuple(subjects), ("flashmoe", *sys.argv[1:]), folder, ceilings, timeout)
    with Screen() as screen, turn(device_name(bench.device), False, screen.stage), RunWriter(path) as writer:
        run_profile(bench, writer, options, screen.watch)
    run = read_run(path)
    if not quiet:
        typer.echo(f"records and reports in {folder}")
    machine, runs = gpu_name(run.header.environment), _with_evidence(run, evidence)
    found = []
    for one in subjects:
        try:
            found.append(diagnose(runs, str(one.problem), one.who, one.config, machine))
        except NothingKnown as error:
            typer.echo(f"flashmoe: {error}", err=True)
    return found


def _with_evidence(run: Run, evidence: Path) -> list[Run]:
    """The run with the committed ones: they know other sizes, and rivals."""
    others = runs_under(evidence) if evidence.is_dir() else []
    return [run, *(other for other in others if other.header.run != run.header.run)]


def _subjects(bench: Bench, words: Sequence[str], kernels: Sequence[str], config: str | None) -> list[Subject]:
    """Each kernel on each problem. Raises ValueError, in one line, for whatever cannot be looked at here."""
    from flashmoe_science.measure.profile.profile import default_kernel, default_problems, subject
    from flashmoe_science.measure.suites import problems_named

    named = problems_named(list(words))[1] if words else ()
    if config is not None and len(kernels) != 1:
        raise ValueError(f"--config is {config!r}; it needs one --kernel, whose config it is")
    if not kernels:
        return [subject(default_kernel(one, bench), one, None, bench) for one in named or default_problems(None, bench)]
    return [subject(who, one, config, bench) for who in kernels for one in named or default_problems(who, bench)]


def _print(found: Sequence[Diagnosis]) -> None:
    from flashmoe_science.cli.causes import console, print_diagnosis

    screen = console()
    for one in found:
        print_diagnosis(screen, one)
