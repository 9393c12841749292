"""Our kernels built before the run meets them, in many processes at once: Triton keeps on disk what it has built.

A round builds what it needs, one after another, which for a suite of some hundred builds is minutes of a GPU that idles. Here
each process plans kernels for tensors of the problems' shapes, not filled, and ends. What goes wrong here is nobody's finding:
the round meets it again and records it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from flashmoe_science.children import end_with_parent
from flashmoe_science.kernel import Config
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.inputs import TORCH_DTYPE
from flashmoe_science.measure.paths import Todo
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.inputs import AttentionInputs
from flashmoe_science.ops.attention.problem import AttentionProblem

FEWEST = 4  # builds below which the processes take longer to start than the builds
_MOST_WORKERS = 14
_CONTEXT_BYTES = 600 << 20  # device memory of a process before it allocates anything (some 500 MiB on an H200)
_HOST_BYTES = 3 << 29  # host memory of a process with PyTorch, Triton and a compiler in it
_SHARE = 0.5  # of the memory that is there


@dataclass(frozen=True, slots=True)
class Build:
    """One kernel to plan for one problem, by names: a Kernel cannot be sent to another process."""

    problem: str
    kernel: str
    config: str
    return_lse: bool


Batch = tuple[Build, ...]


def batches(todo: Sequence[Todo]) -> tuple[Batch, ...]:
    """Every build of ours that a run will need, with and without the log-sum-exp, those that are likely the same in one batch.

    A kernel is specialised on its config, the dtype, head dimensions and mask; on lengths and strides only in part. Two
    processes that build the same do it twice, one process does it once: a batch is one process's. The longest come first.
    """
    alike: dict[tuple[object, ...], dict[Build, None]] = {}
    for one in todo:
        problem = one.problem
        if not isinstance(problem, AttentionProblem):
            continue  # no kernel of ours with a plan serves another operation
        for candidate in one.candidates:
            if candidate.kernel.origin != "ours" or candidate.kernel.plan is None:
                continue
            for lse in (False, True):
                kind = (
                    candidate.name,
                    candidate.config,
                    problem.dtype,
                    problem.head_dim,
                    problem.head_dim_v,
                    problem.causal,
                    lse,
                )
                build = Build(str(problem), candidate.name, str(candidate.config), lse)
                alike.setdefault(kind, {})[build] = None
    return tuple(sorted((tuple(group) for group in alike.values()), key=len, reverse=True))


def _attention(text: str) -> AttentionProblem:
    problem = parse_problem(text)
    assert isinstance(problem, AttentionProblem)  # as ``batches`` chose them
    return problem


def tensor_bytes(problem: AttentionProblem) -> int:
    """Device memory of a problem's Q, K, V, output and log-sum-exp."""
    return problem.min_bytes() + 4 * problem.batch * problem.heads * problem.seqlen_q


def workers(wanted: Sequence[Batch], cpus: int, host_bytes: int, device_bytes: int) -> int:
    """How many processes at once: no more than there is work, processors and memory for. 0 where there is memory for none."""
    largest = max((tensor_bytes(_attention(build.problem)) for batch in wanted for build in batch), default=0)
    by_host = int(_SHARE * host_bytes) // _HOST_BYTES
    by_device = int(_SHARE * device_bytes) // (_CONTEXT_BYTES + largest)
    return max(0, min(_MOST_WORKERS, len(wanted), max(1, cpus - 1), by_host, by_device))


def prebuild(bench: Bench, todo: Sequence[Todo], deadline: float | None, on_done: Callable[[int, int], None]) -> None:
    """Fill Triton's cache with what ``todo`` needs. ``on_done(done, total)`` is told how many builds are done.

    Does nothing on a CPU, for a few builds, or without the memory; ends early at the deadline (of time.monotonic). Every
    process has ended, and its memory is free again, when this returns.
    """
    wanted = batches(todo)
    total = sum(map(len, wanted))
    if bench.gpu is None or total < FEWEST:
        return
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    count = workers(wanted, cpus, host_bytes, torch.cuda.mem_get_info(bench.device)[0])
    if count < 2:
        return  # the round does as well by itself
    on_done(0, total)
    # "spawn": a CUDA context does not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(bench.device.index or 0,))
    try:
        futures = {pool.submit(_build, batch, deadline): len(batch) for batch in wanted}
        done = 0
        for future in as_completed(futures):
            future.result()
            done += futures[future]
            on_done(done, total)
    except (BrokenProcessPool, OSError):
        pass  # no process could start, or a compiler took one down: the round builds what is left, and records what fails
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(device: int) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent is who answers it
    torch.set_num_threads(1)
    torch.cuda.set_device(device)


def _build(batch: Batch, deadline: float | None) -> None:
    """In another process: plan each kernel of the batch; nothing is launched."""
    device = torch.device("cuda", torch.cuda.current_device())
    for build in batch:
        if deadline is not None and time.monotonic() > deadline:  # the same clock in every process of a machine
            return
        try:
            plan_once(build, device)
        except Exception:  # see the top
            continue
        finally:
            torch.cuda.empty_cache()


def plan_once(build: Build, device: torch.device) -> None:
    """Plan one kernel for unfilled tensors of its problem. Raises whatever the plan raises."""
    from flashmoe_science.operations import kernel_named
    from flashmoe_science.ops.launch import allocate_output

    kernel, problem = kernel_named(build.kernel), _attention(build.problem)
    assert kernel.plan is not None
    q, k, v = (_unfilled(problem, *sizes, device) for sizes in _sizes(problem))
    inputs = AttentionInputs(problem, q, k, v, problem.softmax_scale, build.return_lse)
    out = allocate_output(inputs).out
    kernel.plan(AttentionInputs(problem, q, k, v, problem.softmax_scale, build.return_lse, out), Config.parse(build.config))


def _sizes(problem: AttentionProblem) -> tuple[tuple[int, int, int], ...]:
    """Heads, rows and width of Q, K and V."""
    return (
        (problem.heads, problem.seqlen_q, problem.head_dim),
        (problem.heads_kv, problem.seqlen_k, problem.head_dim),
        (problem.heads_kv, problem.seqlen_k, problem.head_dim_v),
    )


def _unfilled(problem: AttentionProblem, heads: int, rows: int, width: int, device: torch.device) -> torch.Tensor:
    """A [batch, heads, rows, width] view in the problem's memory order, as ``inputs.make_inputs`` makes them."""
    dtype = TORCH_DTYPE[problem.dtype]
    if problem.layout == "bhsd":
        return torch.empty((problem.batch, heads, rows, width), dtype=dtype, device=device)
    return torch.empty((problem.batch, rows, heads, width), dtype=dtype, device=device).transpose(1, 2)
