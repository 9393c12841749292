"""Every kernel and config compiled for GPUs that are not here, and held against their limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashmoe_science.hardware.gpus import Gpu, gpu_named
from flashmoe_science.hardware.target import Build, compile_many, fits
from flashmoe_science.kernel import CompileJob, Kernel
from flashmoe_science.measure.bench import Candidate
from flashmoe_science.measure.ledger import Ledger
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem

GPUS = ("l4", "a100", "h200", "b200")  # sm_89, sm_80, sm_90, sm_100
PROBLEMS = tuple(
    parse_problem(text)
    for text in ("attn b4 h16 q4096 d128 bf16 causal", "attn b8 h4 q128 d64 fp16", "attn b4 h8 q4096 d256 bf16")
)


@dataclass(frozen=True, slots=True)
class Job:
    """One build: a candidate for a problem on a GPU."""

    candidate: Candidate
    problem: Problem
    gpu: Gpu


def jobs(kernels: Sequence[Kernel], problems: Sequence[Problem], gpus: Sequence[str] = GPUS) -> tuple[Job, ...]:
    """Every config of every kernel, for each problem and GPU where it claims to run."""
    return tuple(
        Job(Candidate(kernel, config), problem, gpu)
        for kernel in kernels
        if kernel.compile_job is not None
        for problem in problems
        for gpu in map(gpu_named, gpus)
        if kernel.supports(problem, gpu) is None
        for config in kernel.configs(problem, gpu)
    )


def build_all(ledger: Ledger, todo: Sequence[Job], on_done: Callable[[int], None]) -> int:
    """Build the jobs; refuse those that do not fit, note each kernel's registers, shared memory and spills.

    ``on_done`` is told how many are done. Returns how many fit.

    Raises:
        CompilerUnavailable: nothing can be compiled here.
    """
    done = 0

    def tell(index: int, build: Build) -> None:
        nonlocal done
        done += 1
        on_done(done)

    builds = compile_many([(_compile_job(job), job.gpu) for job in todo], on_done=tell)
    fitting = 0
    by_kernel: dict[str, list[Build]] = {}
    for job, build in zip(todo, builds, strict=True):
        by_kernel.setdefault(job.candidate.name, []).append(build)
        refusal = fits(build, job.gpu)
        if refusal is None:
            fitting += 1
        else:
            ledger.refuse("preflight", f"on {job.gpu.product}: {refusal}", job.problem, job.candidate)
    for name, built in by_kernel.items():
        ledger.note(_summary(built), kernel=name)
    return fitting


def _compile_job(job: Job) -> CompileJob:
    kernel, config = job.candidate.kernel, job.candidate.config
    assert kernel.compile_job is not None
    return kernel.compile_job(job.problem, config, job.gpu)


def _summary(builds: Sequence[Build]) -> str:
    """How a kernel's builds stand, by GPU."""
    parts = []
    for gpu in dict.fromkeys(build.gpu for build in builds):
        here = [build for build in builds if build.gpu == gpu]
        spilling = sum(1 for build in here if build.spill_bytes)
        shared, registers = max(build.shared_bytes for build in here), max(build.registers for build in here)
        parts.append(
            f"{gpu}: {len(here)} builds, at most {registers} registers a thread and {shared} bytes of shared memory a block"
            + (f", {spilling} spill (at most {max(build.spill_bytes for build in here)} bytes a thread)" if spilling else "")
        )
    return f"compiled for {'; '.join(parts)}"
