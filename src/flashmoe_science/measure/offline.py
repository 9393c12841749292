"""What can be proved of our kernels without a GPU: that they build for GPUs that are not here, fit them, and are right.

Correctness is shown in Triton's interpreter, which is chosen when a kernel is decorated and so needs a process of its own: a
worker in a child with TRITON_INTERPRET=1, held to the same oracle by the same exam.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import torch

from flashmoe_science.hardware.gpus import Gpu, gpu_named
from flashmoe_science.hardware.target import Build, CompilerUnavailable, compile_many, fits
from flashmoe_science.kernel import AnyKernel, CompileJob, Config
from flashmoe_science.measure.channel import Died, Failed, Home, InProcess
from flashmoe_science.measure.correctness import Exam
from flashmoe_science.measure.inputs import Files
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.measure.request import Entry, of_kernel
from flashmoe_science.measure.session import COULD_NOT_RUN, GOOD, WRONG, Outcome, Session
from flashmoe_science.operations import OPERATIONS, operation, parse_problem
from flashmoe_science.problem import Problem

SUITE = "no-gpu"
GPUS = ("l4", "a100", "h200", "b200")  # sm_89, sm_80, sm_90, sm_100
MODEL_GPU = "h200"  # whose configs are interpreted: they decide the tiles, not the arithmetic
MOST_EXPONENTIALS = 2**18  # of a problem that the interpreter can do in seconds
_WATCHDOG_S = 300.0


class Job(NamedTuple):
    """One build, or one run in the interpreter: an entry on a problem."""

    kernel: AnyKernel
    config: Config
    problem: Problem

    @property
    def entry(self) -> Entry:
        return Entry(of_kernel(self.kernel), str(self.config))

    def compile_job(self, gpu: Gpu) -> CompileJob:
        assert self.kernel.compile_job is not None
        return self.kernel.compile_job(self.problem, self.config, gpu)


def kernels_to_build(name: str | None) -> tuple[AnyKernel, ...]:
    """Ours that can be built without a GPU: the one named, or all."""
    every = (kernel for op in OPERATIONS for kernel in op.ours())
    return tuple(kernel for kernel in every if kernel.compile_job is not None and name in (None, kernel.name))


class OfflineRun:
    """Builds every kernel for GPUs that are not here, then interprets them; one run's rows into ``sink``.

    ``problems`` of None are the default ones of each stage. The builds come first: what does not build need not be interpreted.
    """

    def __init__(self, session: Session, kernels: Sequence[AnyKernel], problems: Sequence[Problem] | None) -> None:
        self.session, self.request = session, session.request
        self.kernels, self.problems = kernels, problems
        self.found: list[str] = []  # what came of it, in words

    def run(self) -> Outcome:
        self.session.begin(SUITE)
        stopped = self._build() or self._interpret()
        code = WRONG if self.session.outcome.wrong else COULD_NOT_RUN if stopped else GOOD
        return self.session.end(stopped, code=code)

    def _build(self) -> str | None:
        """Compile and hold each build against its GPU; returns why the run stops here, or None."""
        jobs = build_jobs(self.kernels, self.problems, self.request.quick)
        if not jobs:
            return "there is nothing to build: none of the kernels serves any of the problems on any of the GPUs"
        text = f"building for {', '.join(GPUS)}"
        self.session.total = len(jobs)

        def tell(index: int, build: Build) -> None:
            self.session.done += 1
            self.session.tell(text)

        self.session.tell(text)
        try:
            builds = compile_many([(job.compile_job(gpu), gpu) for job, gpu in jobs], on_done=tell)
        except CompilerUnavailable as error:
            self.session.unusable(str(error))
            return str(error)
        unfit = 0
        for (job, gpu), build in zip(jobs, builds, strict=True):
            if (reason := fits(build, gpu)) is not None:
                unfit += 1
                self.session.refuse("preflight", f"on {gpu.product}: {reason}", job.problem, job.entry)
        spilling = sum(build.spill_bytes > 0 for build in builds)
        fit = f"{len(builds) - unfit} fit their GPU" if unfit else "all fit their GPU"
        self.found.append(f"{len(builds)} builds for {', '.join(GPUS)}: {fit}, {spilling} spill registers")
        self.session.note(self.found[-1])
        return f"{unfit} of {len(builds)} builds do not fit their GPU" if unfit else None

    def _interpret(self) -> str | None:
        """Hold the interpretable kernels to the oracle. Returns why the run stops here, or None."""
        for kernel in self.kernels:
            if not kernel.interpretable:
                text = "Triton has no interpreter for its dialect; without a GPU it is built, not run"
                self.session.note(text, kernel=kernel.name)
        jobs = interpreter_jobs(self.kernels, self.problems, self.request.quick)
        if not jobs:
            self.session.note("nothing was interpreted: no problem is small enough, or no kernel can be")
        self.session.done, self.session.total, examined = 0, len(jobs), set[str]()
        for op in dict.fromkeys(job.problem.op for job in jobs):
            with closing(Home(None, op, _WATCHDOG_S, {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})) as interpreter:
                oracle = InProcess(Oracle(Files(), torch.device("cpu")).command)
                oracle.ask("open", contract=op)
                for job in (job for job in jobs if job.problem.op == op):
                    self.session.tell(f"interpreting {job.kernel.name} on {job.problem}")
                    whole = job.kernel.name not in examined and _is_typical(job.problem)
                    examined |= {job.kernel.name} if whole else set()
                    self._hold(interpreter, oracle, job, whole)
                    self.session.done += 1
        self.found.append(f"{self.session.done} results in Triton's interpreter held to the oracle")
        wrong = len(self.session.outcome.wrong)
        return f"{wrong} of {len(jobs)} cases are wrong in the interpreter" if wrong else None

    def _hold(self, interpreter: Home, oracle: InProcess, job: Job, whole: bool) -> None:
        """One case: a call with NaN around its memory, or the whole exam once for each kernel."""
        entry, contract = job.entry, operation(job.problem.op).contract()
        try:
            oracle.ask("problem", text=str(job.problem), by_function=False)
            child = interpreter.at(job.problem)
            exam = Exam(child, oracle, entry.who, entry.config, self.request.seed, False, repeats=1, more_s=0.0)
            if whole:
                found = exam.whole(contract.distributions, contract.variants, deterministic=True)
            else:
                found = exam.glance(guard=True, poison=True)
        except (Failed, Died) as error:
            self.session.refuse("correctness", f"it does not run in the interpreter: {error}", job.problem, entry)
            return
        self.session.examined(job.problem, entry, found)


def build_jobs(kernels: Sequence[AnyKernel], problems: Sequence[Problem] | None, quick: bool) -> list[tuple[Job, Gpu]]:
    """Every config of every kernel, for each problem and GPU where it claims to run."""
    jobs = []
    for kernel in kernels:
        texts = operation(kernel.op).contract().build_problems()
        wanted = [parse_problem(text) for text in (texts[:1] if quick else texts)] if problems is None else problems
        jobs += [
            (Job(kernel, config, problem), gpu)
            for problem in wanted
            for gpu in map(gpu_named, GPUS)
            if kernel.cannot(problem, gpu) is None
            for config in kernel.configs(problem, gpu)
        ]
    return jobs


def interpreter_jobs(kernels: Sequence[AnyKernel], problems: Sequence[Problem] | None, quick: bool) -> list[Job]:
    """Each interpretable kernel on each small problem that it serves with its first config, and once with each other config."""
    gpu = gpu_named(MODEL_GPU)
    jobs: list[Job] = []
    for kernel in (kernel for kernel in kernels if kernel.interpretable):
        every = [parse_problem(text) for text in operation(kernel.op).contract().small_problems()]
        wanted = (every[::3] if quick else every) if problems is None else problems
        tried: set[Config] = set()
        for problem in wanted:
            if kernel.cannot(problem, gpu) is not None or problem.exponentials() > MOST_EXPONENTIALS:
                continue
            first, *others = kernel.configs(problem, gpu)
            new = [config for config in others if config not in tried]
            tried.update((first, *new))
            jobs += [Job(kernel, config, problem) for config in (first, *new)]
    return jobs


def _is_typical(problem: Problem) -> bool:
    """Whether the whole exam says something on the problem: more than one element, and few enough."""
    return 2**8 < problem.exponentials() < 2**14
