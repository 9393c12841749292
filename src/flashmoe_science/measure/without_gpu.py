"""What can be proved of our kernels without a GPU: that they build for GPUs, fit them, and compute the right thing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from flashmoe_science.hardware.target import CompilerUnavailable
from flashmoe_science.kernel import Kernel
from flashmoe_science.measure import builds
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.interpret import cases, default_problems, interpret, small
from flashmoe_science.measure.ledger import COULD_NOT_RUN, GOOD, WRONG, Ledger, Sink
from flashmoe_science.measure.session import Outcome, Progress, begin, end, new_run_id, outcome
from flashmoe_science.problem import Problem

SUITE = "no-gpu"


def prove_without_gpu(
    bench: Bench,
    sink: Sink,
    kernels: Sequence[Kernel],
    problems: Sequence[Problem] | None,
    command: Sequence[str],
    watch: Callable[[Progress], None],
    quick: bool = False,
    seed: int = 42,
) -> Outcome:
    """Build every kernel for GPUs that are not here, then interpret them against the oracle; one run's rows into ``sink``.

    ``problems`` of None are the default ones of each stage. The builds come first: what does not build need not be interpreted.
    """
    ledger, began = Ledger(new_run_id(), sink), time.monotonic()
    begin(ledger, bench, SUITE, command, seed)
    stopped = _build(ledger, kernels, problems, quick, watch)
    done = 0
    if stopped is None:
        stopped, done = _interpret(ledger, kernels, problems, quick, seed, watch)
    code = WRONG if ledger.wrong else COULD_NOT_RUN if stopped else GOOD
    end(ledger, began, code)
    return outcome(ledger, code, done, 0, stopped)


def _build(
    ledger: Ledger,
    kernels: Sequence[Kernel],
    problems: Sequence[Problem] | None,
    quick: bool,
    watch: Callable[[Progress], None],
) -> str | None:
    """Compile; returns why the run stops here, or None."""
    wanted = (builds.PROBLEMS[:1] if quick else builds.PROBLEMS) if problems is None else problems
    todo = builds.jobs(kernels, wanted)
    if not todo:
        return "there is nothing to build: none of the kernels serves any of the problems on any of the GPUs"
    watch(Progress(0, len(todo), f"building for {', '.join(builds.GPUS)}"))
    try:
        fitting = builds.build_all(
            ledger, todo, lambda done: watch(Progress(done, len(todo), f"building for {', '.join(builds.GPUS)}"))
        )
    except CompilerUnavailable as error:
        ledger.refuse("preflight", str(error))
        return str(error)
    return None if fitting == len(todo) else f"{len(todo) - fitting} of {len(todo)} builds do not fit their GPU"


def _interpret(
    ledger: Ledger,
    kernels: Sequence[Kernel],
    problems: Sequence[Problem] | None,
    quick: bool,
    seed: int,
    watch: Callable[[Progress], None],
) -> tuple[str | None, int]:
    """Hold the interpretable kernels to the oracle. Returns why the run stops here, or None, and how many cases were done."""
    wanted = default_problems(quick) if problems is None else small(problems)
    for kernel in kernels:
        if not kernel.interpretable:
            ledger.note("Triton has no interpreter for its dialect; without a GPU it is built, not run", kernel=kernel.name)
    todo = cases(kernels, wanted)
    if not todo:
        ledger.note("nothing was interpreted: no problem is small enough, or no kernel can be")
    watch(Progress(0, len(todo), "interpreting"))
    done = 0
    try:
        for row in interpret(ledger.run, seed, todo):
            ledger.take(row)
            if row.kind == "correctness":
                done += 1
                watch(Progress(done, len(todo), f"interpreting {row.kernel} on {row.problem}"))
    except RuntimeError as error:
        ledger.refuse("correctness", str(error))
        return str(error), done
    wrong = len(ledger.wrong)
    return (f"{wrong} of {len(todo)} cases are wrong in the interpreter" if wrong else None), done
