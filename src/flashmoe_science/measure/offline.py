"""The checks of our kernels that need no GPU: they build for GPUs that are not here, fit them, and are right.

Correctness is shown in Triton's interpreter, which is chosen when a kernel is decorated and so needs a process of its own: a
worker in a child with TRITON_INTERPRET=1, checked by the same exam against the same oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing

import torch

from flashmoe_science.hardware.gpus import Gpu, gpu_named
from flashmoe_science.hardware.target import Build, CompilerUnavailable, compile_many, fits
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.kernel import AnyKernel, CompileJob, Config
from flashmoe_science.measure.builds import compile_jobs
from flashmoe_science.measure.channel import Died, Failed, InProcess, WorkerHost
from flashmoe_science.measure.correctness import Exam
from flashmoe_science.measure.inputs import Files
from flashmoe_science.measure.oracle import Oracle
from flashmoe_science.measure.request import Entry
from flashmoe_science.measure.session import Outcome, Session
from flashmoe_science.operations import OPERATIONS, operation, parse_problem
from flashmoe_science.problem import Problem

SUITE = "no-gpu"
GPUS = ("l4", "a100", "h200", "b200", "a10", "rtx5090")  # sm_89, sm_80, sm_90, sm_100, sm_86, sm_120
MODEL_GPU = "h200"  # the interpreted configs are this GPU's: configs decide the tiles, not the arithmetic
MAX_EXPONENTIALS, MAX_PROGRAMS = 2**18, 2**10  # of a problem, and of its launches, that the interpreter can do in seconds
_TYPICAL = range(2**8 + 1, 2**14)  # exponentials of a problem on which the full exam is meaningful and takes seconds
_WATCHDOG_S = 300.0
_INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # the environment of the worker


def kernels_to_build(names: Sequence[str]) -> tuple[AnyKernel, ...]:
    """Ours that can be built without a GPU: those named, or all."""
    every = (kernel for op in OPERATIONS for kernel in op.ours())
    return tuple(kernel for kernel in every if kernel.plan is not None and (not names or kernel.name in names))


class OfflineRun:
    """Builds every kernel for GPUs that are not here, then interprets them. ``problems`` of None are the default ones of each
    stage. The builds come first: what does not build need not be interpreted."""

    def __init__(self, session: Session, kernels: Sequence[AnyKernel], problems: Sequence[Problem] | None) -> None:
        self.session, self.quick, self.kernels, self.problems = session, session.request.quick, kernels, problems
        self.found: list[str] = []  # results, as text

    def run(self) -> Outcome:
        self.session.begin(SUITE)
        stopped = self._build() or self._interpret()
        return self.session.end(stopped, timed=False)

    def _build(self) -> str | None:
        """Compile and compare each build with its GPU. Returns why the run stops here, or None."""
        jobs = self._builds()
        if not jobs:
            return "there is nothing to build: none of the kernels serves any of the problems on any of the GPUs"
        self.session.total = len(jobs)

        def on_done(index: int, build: Build) -> None:
            self.session.done += 1
            self.session.show_progress(f"building for {', '.join(GPUS)}")

        try:
            builds = compile_many([(job, gpu) for *_, gpu, job in jobs], on_done=on_done)
        except CompilerUnavailable as error:
            self.session.unusable(str(error))
            return str(error)
        unfit = 0
        for (kernel, config, problem, gpu, _), build in zip(jobs, builds, strict=True):
            if (reason := fits(build, gpu)) is not None:
                unfit += 1
                entry = Entry(kernel.name, kernel.name, kernel, str(config))
                self.session.refuse("preflight", f"{build.kernel} on {gpu.product}: {reason}", problem, entry)
        spilling = sum(build.spill_bytes > 0 for build in builds)
        fit = f"{len(builds) - unfit} fit their GPU" if unfit else "all fit their GPU"
        self.found.append(f"{len(builds)} builds for {', '.join(GPUS)}: {fit}, {spilling} spill registers")
        self.session.note(self.found[-1])
        return f"{unfit} of {len(builds)} builds do not fit their GPU" if unfit else None

    def _builds(self) -> list[tuple[AnyKernel, Config, Problem, Gpu, CompileJob]]:
        """The compile jobs of every config of every kernel, for each problem and GPU that it supports."""
        jobs = []
        for kernel in self.kernels:
            texts = operation(kernel.op).contract().build_problems()[: 1 if self.quick else None]
            jobs += [
                (kernel, config, problem, gpu, job)
                for problem in (map(parse_problem, texts) if self.problems is None else self.problems)
                for gpu in map(gpu_named, GPUS)
                if kernel.cannot(problem, gpu) is None
                for config in kernel.configs(problem, gpu)
                for job in compile_jobs(kernel, problem, config, gpu)
            ]
        return jobs

    def _interpret(self) -> str | None:
        """Compare the interpretable kernels with the oracle. Returns why the run stops here, or None."""
        jobs: list[tuple[Entry, Problem]] = []
        for kernel in self.kernels:
            if kernel.interpretable:
                jobs += self._small(kernel)
            else:
                text = "Triton has no interpreter for its dialect; without a GPU it is built, not run"
                self.session.note(text, kernel=kernel.name)
        if not jobs:
            self.session.note("nothing was interpreted: no problem is small enough, or no kernel can be")
        self.session.done, self.session.total, examined = 0, len(jobs), set[str]()
        for op, own in grouped(jobs, lambda job: job[1].op).items():
            with closing(WorkerHost(None, op, _WATCHDOG_S, _INTERPRETED)) as interpreter:
                oracle = InProcess(Oracle(Files(), torch.device("cpu")).command)
                oracle.ask("open", contract=op)
                for entry, problem in own:
                    self.session.show_progress(f"interpreting {entry.name} on {problem}")
                    full = entry.name not in examined and problem.exponentials() in _TYPICAL
                    examined |= {entry.name} if full else set()
                    self._check(interpreter, oracle, entry, problem, full)
                    self.session.done += 1
        self.found.append(f"{self.session.done} results in Triton's interpreter held to the oracle")
        wrong = len(self.session.outcome.wrong)
        return f"{wrong} of {len(jobs)} cases are wrong in the interpreter" if wrong else None

    def _small(self, kernel: AnyKernel) -> list[tuple[Entry, Problem]]:
        """The kernel on each small problem that it serves with its first config, and once with each other config."""
        gpu, tried, jobs = gpu_named(MODEL_GPU), set[Config](), list[tuple[Entry, Problem]]()
        texts = operation(kernel.op).contract().small_problems()[:: 3 if self.quick else 1]
        for problem in map(parse_problem, texts) if self.problems is None else self.problems:
            if kernel.cannot(problem, gpu) is None and problem.exponentials() <= MAX_EXPONENTIALS:
                first, *others = kernel.configs(problem, gpu)
                if any(math.prod(launch.grid or ()) > MAX_PROGRAMS for launch in kernel.launches(problem, first, gpu)):
                    continue
                new = (first, *(config for config in others if config not in tried))
                tried.update(new)
                jobs += [(Entry(kernel.name, kernel.name, kernel, str(config)), problem) for config in new]
        return jobs

    def _check(self, interpreter: WorkerHost, oracle: InProcess, entry: Entry, problem: Problem, full: bool) -> None:
        """Check one case: a call with NaN around its memory, or the full exam once for each kernel."""
        contract, seed = operation(problem.op).contract(), self.session.request.seed
        try:
            oracle.ask("problem", text=str(problem), by_function=False)
            exam = Exam(interpreter.at(problem), oracle, entry.who, entry.config, seed, False, repeats=1, more_s=0.0)
            if full:
                found = exam.full(contract.distributions, contract.variants, deterministic=True)
            else:
                found = exam.one_call(guard=True, poison=True)
        except (Failed, Died) as error:
            self.session.refuse("correctness", f"it does not run in the interpreter: {error}", problem, entry)
        else:
            self.session.examined(problem, entry, found)
