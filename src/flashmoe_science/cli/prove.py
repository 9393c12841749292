"""``flashmoe prove``: measure, judge, report; or, where there is no GPU, all of that which needs none."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flashmoe_science.cli.judgement import Judgement
    from flashmoe_science.cli.progress import Screen
    from flashmoe_science.measure.bench import Bench
    from flashmoe_science.measure.choice import Group
    from flashmoe_science.measure.session import Outcome

GOOD, WRONG, COULD_NOT_RUN, UNTRUSTWORTHY = 0, 1, 2, 3
_WORST_FIRST = (WRONG, COULD_NOT_RUN, UNTRUSTWORTHY, GOOD)


def prove(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SUITE|PROBLEM]...", help="documents, long, quick, cpu, or the text of a problem."),
    ] = None,
    kernel: Annotated[str | None, typer.Option("--kernel", help="Put one kernel on trial in place of all of ours.")] = None,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", metavar="KERNEL", help='A rival, may be repeated; "all" is every peer.'),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples, configs and cases.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every config and every peer.")] = False,
    configs: Annotated[
        int | None, typer.Option("--configs", min=1, help="How many configs of a kernel to try (4; 1 with --quick).")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for records and report (reports/<time>).")] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="Stop measuring after so many seconds.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the inputs.")] = 42,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> int:
    """Prove the kernels: call path, correctness, speed on two clocks against the best rivals, verdicts and a report.

    Without a GPU: every kernel built for GPUs that are not here and interpreted against the fp64 oracle, PyTorch's attention
    timed on the CPU, and the committed records judged again.

    Exit code: 0 all good, 1 a kernel is wrong or a claim fails, 2 it could not run, 3 refused as untrustworthy.

    \b
    Examples:
      flashmoe prove
      flashmoe prove documents long --budget 600
      flashmoe prove "attn b1 h16 q4096 d128 bf16 causal" --against sdpa --against fa3
    """
    if quick and full:
        raise ValueError("--quick and --full are both given; give one or the other")
    if budget is not None and not budget > 0:
        raise ValueError(f"--budget is {budget:g}; it must be more than 0 seconds")
    from flashmoe_science.cli.judgement import judge_and_report
    from flashmoe_science.cli.progress import Screen
    from flashmoe_science.measure.bench import bench_here

    bench = bench_here()
    asked = _Asked(bench, targets or [], kernel, against or [], quick, full, configs, budget, seed)
    folder = _folder(out)
    with Screen() as screen:
        outcomes = asked.run(folder, screen)
        screen.stage("judging")
        judgement = judge_and_report(folder)
    code = _code(outcomes, judgement)
    if as_json:
        typer.echo(json.dumps(_as_dict(code, folder, outcomes, judgement), indent=2))
    else:
        judgement.print()
        _print_outcomes(code, folder, outcomes, judgement)
    return code


class _Asked:
    """The request made definite. Making it raises ValueError, in one line, for whatever cannot be done."""

    def __init__(
        self,
        bench: Bench,
        targets: list[str],
        kernel: str | None,
        against: list[str],
        quick: bool,
        full: bool,
        configs: int | None,
        budget: float | None,
        seed: int,
    ) -> None:
        from flashmoe_science.measure import choice

        self.bench, self.quick, self.budget, self.seed = bench, quick, budget, seed
        self.began = time.monotonic()
        self.configs = configs if configs is not None else 1 if quick else sys.maxsize if full else 4
        self.command = ("flashmoe", *sys.argv[1:])
        self.groups: tuple[Group, ...] = choice.groups(targets, bench.gpu)
        problems = [problem for group in self.groups for problem in group.problems]
        self.named_problems = tuple(problems) if targets else None
        self.built = choice.buildable(kernel) if bench.gpu is None else ()
        timed_name = None if self.built and kernel is not None else kernel  # ours, named, cannot be timed on a CPU
        self.subjects = choice.subjects(timed_name, problems, bench.gpu)
        self.rivals = choice.rivals(against, full, self.subjects, bench.gpu)
        self.left_out = choice.left_out(self.rivals, self.subjects, bench.gpu)
        if not self.rivals and not self.built:
            raise ValueError(f"--against leaves no rival for {', '.join(one.name for one in self.subjects)}; name another")

    def run(self, folder: Path, screen: Screen) -> list[Outcome]:
        """Every stage in order; after one that fails, none further."""
        from flashmoe_science.measure.without_gpu import prove_without_gpu
        from flashmoe_science.store import RunWriter

        outcomes: list[Outcome] = []
        if self.built:
            with RunWriter(folder / "run-no-gpu.jsonl") as writer:
                outcomes.append(
                    prove_without_gpu(
                        self.bench, writer, self.built, self.named_problems, self.command, screen.watch, self.quick, self.seed
                    )
                )
        for group in self.groups:
            if outcomes and outcomes[-1].exit_code in (WRONG, COULD_NOT_RUN):
                break
            outcomes.append(self._measure(group, folder, screen))
        return outcomes

    def _measure(self, group: Group, folder: Path, screen: Screen) -> Outcome:
        from flashmoe_science.measure.session import Options, Session
        from flashmoe_science.store import RunWriter

        options = Options(
            suite=group.name,
            problems=group.problems,
            subjects=self.subjects,
            rivals=self.rivals,
            command=self.command,
            quick=self.quick,
            configs=self.configs,
            budget_s=None if self.budget is None else max(0.0, self.budget - (time.monotonic() - self.began)),
            seed=self.seed,
            left_out=self.left_out,
        )
        with RunWriter(folder / f"run-{group.name}.jsonl") as writer:
            return Session(self.bench, writer, options, screen.watch).run()


def _folder(out: Path | None) -> Path:
    """The folder of this run, made and writable.

    Raises:
        ValueError: it cannot be made or written.
    """
    folder = out if out is not None else Path("reports") / f"{datetime.now():%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
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
    for outcome in outcomes:
        for reason in outcome.wrong:
            typer.echo(f"wrong: {reason}")
        for reason in outcome.untrustworthy:
            typer.echo(f"refused: {reason}")
        if outcome.stopped:
            typer.echo(f"stopped: {outcome.stopped}")
        if outcome.problems_left:
            typer.echo(f"not measured: {outcome.problems_left} problems (the budget is spent)")
    checked, timed = sum(outcome.checked for outcome in outcomes), sum(outcome.timed for outcome in outcomes)
    words = {
        GOOD: "all good",
        WRONG: "a kernel is wrong or a claim fails",
        COULD_NOT_RUN: "it could not run",
        UNTRUSTWORTHY: "refused as untrustworthy",
    }
    typer.echo(f"{words[code]}: {checked} results held to the oracle, {timed} pairs timed; records and report in {folder}")
