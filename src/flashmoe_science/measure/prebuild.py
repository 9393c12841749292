"""Builds our kernels ahead of a run, in many processes at once: Triton caches builds on disk.

A run builds what it needs one after another, which for a suite of some hundred builds is minutes of a GPU that idles. What goes
wrong here is not recorded: the run fails in the same way and records it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from flashmoe_science.kernel import AnyKernel, Config
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.inputs import Case, make
from flashmoe_science.operations import kernel_named, operation, parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.processes import processors, shared_out

FEWEST = 4  # builds below which the processes take longer to start than the builds
_MAX_WORKERS = 14
_PROCESS_BYTES = 4 << 30  # of host or device memory, with room to spare: PyTorch, Triton and a compiler, a context and tensors

Todo = Sequence[tuple[Problem, Sequence[tuple[str, str]]]]  # problems, each with (kernel, config) pairs
Batch = tuple[tuple[str, str, str], ...]  # (problem, kernel, config): a Kernel cannot be sent to another process


def batches(op: str, todo: Todo) -> list[Batch]:
    """Every build of ours that a run will need, those that are likely the same in one batch, which is one process's: two
    processes would build the same twice. The longest batch first."""
    planned = {kernel.name for kernel in operation(op).ours() if kernel.plan is not None}
    alike: dict[tuple[object, ...], dict[tuple[str, str, str], None]] = {}
    for problem, name, config in ((problem, *pair) for problem, pairs in todo for pair in pairs if pair[0] in planned):
        alike.setdefault((name, config, problem.dtype, problem.tile_key()), {})[str(problem), name, config] = None
    return sorted(map(tuple, alike.values()), key=len, reverse=True)


def room_for(bench: Bench, tensors_bytes: int = 0) -> int:
    """How many further processes the processors and the memory allow, each with ``tensors_bytes`` of tensors; 0 or more."""
    memory = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), torch.cuda.mem_get_info(bench.device)[0])
    return min(_MAX_WORKERS, processors() - 1, memory // (_PROCESS_BYTES + tensors_bytes))


def prebuild(bench: Bench, op: str, todo: Todo, deadline: float, on_progress: Callable[[str], None]) -> None:
    """Fill Triton's cache with what ``todo`` needs; ``on_progress`` gets the number of builds done. Does nothing on a CPU, for
    few builds, or without the memory; ends early at the deadline (of time.monotonic). Every process has ended when this
    returns."""
    wanted = batches(op, todo)
    total, done = sum(map(len, wanted)), 0
    if bench.gpu is None or total < FEWEST:
        return
    workers = min(len(wanted), room_for(bench))
    if workers < 2:
        return  # the run does as well by itself
    on_progress(f"building {total} kernels")
    begin = partial(_use_device, bench.device.index or 0)
    for index, _ in shared_out(build_batch, [(batch, deadline) for batch in wanted], workers, begin):
        done += len(wanted[index])
        on_progress(f"built {done} of {total} kernels")


def _use_device(index: int) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(index)


def build_batch(batch: Batch, deadline: float) -> None:
    """Plan each kernel of the batch, in another process, without a launch."""
    device = torch.device("cuda", torch.cuda.current_device())
    for problem, name, config in batch:
        if time.monotonic() > deadline:  # the same clock in every process of a machine
            return
        with suppress(Exception):  # see the top
            plan_once(parse_problem(problem), kernel_named(name), Config.parse(config), device)
        torch.cuda.empty_cache()


def plan_once(problem: Problem, kernel: AnyKernel, config: Config, device: torch.device) -> None:
    """Plan one kernel with every output and with those that a timed call asks for. Raises whatever the plan raises."""
    contract = operation(problem.op).contract()
    every = contract.for_kernel(problem, make(contract, problem, device, Case(0)))
    for tensors in (every, contract.timed_inputs(every)):
        contract.planned(kernel, config, tensors)
