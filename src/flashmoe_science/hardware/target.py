"""Build kernels for GPUs that need not be here, one or many at a time, and compare the builds with the GPU's limits."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flashmoe_science.hardware.compiler import CompilerUnavailable, Refused, cubin_resources, require_compiler, run_compiler
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.occupancy import RESERVED_SHARED, Residency, block_refusal, kilobytes, residency

if TYPE_CHECKING:
    from flashmoe_science.kernel import CompileJob
from flashmoe_science.processes import processors, shared_out

__all__ = ["Build", "CompilerUnavailable", "build_residency", "compile_for", "compile_many", "fits", "spills"]

TENSOR_MEMORY_COLUMNS = 512  # PTX ISA, "Tensor Memory": 512 columns of 128 lanes, 10.0 and up


@dataclass(frozen=True, slots=True)
class Build:
    """One kernel as built for one GPU; with ``refusal`` the compiler would not build it, and the counts are 0.

    ``registers`` is a thread's at launch: a kernel whose warps trade registers later has others inside.
    ``spill_bytes`` is a thread's stack: Triton kernels put nothing else there. Shared memory is a block's, in bytes.
    ``threads`` is a block's. ``seconds`` is the time that this build took, next to nothing where Triton had it in its cache.
    """

    gpu: str
    kernel: str
    registers: int = 0
    spill_bytes: int = 0
    shared_static: int = 0
    shared_dynamic: int = 0
    tensor_memory_columns: int = 0  # of the 512 that a Blackwell SM has
    threads: int = 0
    seconds: float = 0.0
    refusal: str | None = None

    @property
    def shared_bytes(self) -> int:
        return self.shared_static + self.shared_dynamic


def compile_for(job: CompileJob, gpu: Gpu) -> Build:
    """Build ``job`` for ``gpu``. A kernel that the compiler or assembler rejects is a Build with a ``refusal``.

    Some invalid Gluon programs abort Triton's compiler and with it the process; ``compile_many`` survives that. Raises
    CompilerUnavailable: no Triton here, or it is set to interpret.
    """
    require_compiler()
    name = job.function.__name__
    started = time.perf_counter()
    try:
        compiled = run_compiler(job, gpu)
    except Refused as refused:
        return Build(gpu.name, name, refusal=str(refused), seconds=time.perf_counter() - started)
    registers, stack, shared = cubin_resources(compiled.asm["cubin"])
    threads = re.search(r"^\s*\.reqntid (\d+)", compiled.asm["ptx"], re.MULTILINE)
    if threads is None:
        raise RuntimeError(f"cannot read the threads of {name} for {gpu.name} from Triton's PTX")
    reserved = RESERVED_SHARED if gpu.compute_capability >= (9, 0) else 0
    return Build(
        gpu=gpu.name,
        kernel=name,
        registers=registers,
        spill_bytes=stack,
        shared_static=max(0, shared - reserved),
        shared_dynamic=int(compiled.metadata.shared),
        tensor_memory_columns=int(compiled.metadata.tmem_size or 0),
        threads=int(threads[1]),
        seconds=time.perf_counter() - started,
    )


def fits(build: Build, gpu: Gpu) -> str | None:
    """None where the build can be launched on ``gpu``, else why not. Spills do not make a kernel unfit; see ``spills``."""
    if build.refusal is not None:
        return build.refusal
    if build.shared_static > gpu.shared_per_block_static:
        static, limit = kilobytes(build.shared_static), kilobytes(gpu.shared_per_block_static)
        return f"{static} of static shared memory; above {limit} a block must ask for it at launch (dynamic shared memory)"
    if build.tensor_memory_columns > TENSOR_MEMORY_COLUMNS:
        return f"{build.tensor_memory_columns} columns of tensor memory; an SM has {TENSOR_MEMORY_COLUMNS}"
    return block_refusal(gpu, threads=build.threads, registers=build.registers, shared_bytes=build.shared_bytes)


def spills(build: Build) -> str | None:
    """A warning where the build spills registers to memory, else None."""
    return f"spills {build.spill_bytes} bytes a thread" if build.spill_bytes else None


def build_residency(build: Build, gpu: Gpu) -> Residency:
    """Resident blocks per SM of a build that was not refused."""
    return residency(gpu, threads=build.threads, registers=build.registers, shared_bytes=build.shared_bytes)


def compile_many(
    jobs: Sequence[tuple[CompileJob, Gpu]], on_done: Callable[[int, Build], None] = lambda index, build: None
) -> list[Build]:
    """Build every job in other processes, as many at once as there are CPUs that may be used.

    A job that takes its process down gets a refusal and the others are built. ``on_done(index, build)`` is called here, in
    the order in which builds end. Python's rule for such processes holds: a script guards its main part with ``__main__``.

    Returns:
        The builds, in the order of ``jobs``.

    Raises:
        CompilerUnavailable: as ``compile_for``.
        ValueError: a kernel that is not found by name in its module.
    """
    require_compiler()
    tasks = [(*_by_name(job), gpu) for job, gpu in jobs]
    builds: dict[int, Build] = {}

    def done(index: int, build: Build) -> None:
        builds[index] = build
        on_done(index, build)

    for index, build in shared_out(_build_task, tasks, max(1, min(len(tasks), processors()))):
        done(index, build)
    # A process that died took the pool along, and with it the jobs not yet done: they run again, each in a pool of its own.
    for index in [index for index in range(len(tasks)) if index not in builds]:
        for _, build in shared_out(_build_task, [tasks[index]], 1):
            done(index, build)
        if index not in builds:
            _, name, _, gpu = tasks[index]
            done(index, Build(gpu.name, name, refusal="the compiler crashed and took its process down"))
    return [builds[index] for index in range(len(tasks))]


def _by_name(job: CompileJob) -> tuple[str, str, CompileJob]:
    """The kernel's module and name, and the job without the kernel, which cannot be pickled for another process."""
    module, name = job.function.fn.__module__, job.function.fn.__qualname__
    if getattr(importlib.import_module(module), name, None) is not job.function:
        raise ValueError(f"kernel {name} is not found by that name in {module}; define it at the top of a module")
    return module, name, replace(job, function=None)


def _build_task(module: str, name: str, job: CompileJob, gpu: Gpu) -> Build:
    return compile_for(replace(job, function=getattr(importlib.import_module(module), name)), gpu)
