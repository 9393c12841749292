"""Compare our graph clock with other tools' clocks, like with like: the same call, tensors and process.

    python tools/crosscheck_clocks.py [PROBLEM ...] [--kernel NAME] [--out FILE]
    python tools/crosscheck_clocks.py --recorded evidence

The tools are ``triton.testing.do_bench_cudagraph``, which replays one set of tensors and so leaves the L2 cache warm, and
NVIDIA's cuda-bench (``pip install "cuda-bench[cu13]"``), on a cold and on a warm cache. Our samples come before and after
each tool's. They agree within 3%; where our own clock moves by more meanwhile, nothing is decided. docs/notes/
clocks-cross-checked.md holds what came of it. Exit code: 0 all agree, 2 a tool gave no number, 3 a tool differs.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from flashmoe_science.records import Cache, OtherRow
from flashmoe_science.store import read_runs

TOLERANCE = 0.03
# From 5 to 90 us on an H200. Longer work on tensor cores meets the board's power limit, and then a tool that rests between its
# calls finds a faster clock than one that does not.
PROBLEMS = (
    "attn b1 h1 q512 d64 fp16", "attn b32 h8 q64 d64 fp16", "attn b32 h8 q128 d64 fp16", "attn b4 h16 q256 d128 bf16",
    "attn b32 h8 q256 d64 fp16", "attn b1 h8 q2048 d64 fp16", "attn b4 h8 q2048 d64 fp16",
)  # fmt: skip
TRITON, CUDA_BENCH = "triton.testing.do_bench_cudagraph", "cuda-bench"
LONG_NS = 300_000  # a call so long is executed alone: its start and end, some 2 us, are well under 1% of it
_SAMPLES = 50  # of ours on each side of a tool's, some 2 ms each
Outcome = Literal["agrees", "differs", "undecided", "no number"]


class CrossCheckRow(BaseModel):
    """A kernel's time by another tool, with samples of our graph clock on the same tensors in the same process: half of
    ``ours`` before the tool ran, half after. ``time_ns`` is the tool's figure for one call; None with a ``reason``."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    run: str
    kind: Literal["crosscheck"] = "crosscheck"
    problem: str
    kernel: str
    config: str
    cache: Cache
    tool: str
    tool_version: str
    method: str  # what the tool ran and which of its figures this is, in words
    time_ns: float | None
    samples: list[int] = []  # a call
    ours: list[int] = []
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Agreement:
    """``difference`` is the tool's time over ours, less 1; ``drift`` our median after the tool ran over that before, less 1."""

    outcome: Outcome
    difference: float | None = None
    drift: float | None = None
    why: str | None = None


def agreement(row: CrossCheckRow) -> Agreement:
    """Hold one comparison to the tolerance."""
    half = len(row.ours) // 2
    if row.time_ns is None or half == 0:
        return Agreement("no number", why=row.reason or "the tool, or our clock next to it, gave no time")
    before, after = statistics.median(row.ours[:half]), statistics.median(row.ours[half:])
    if not min(row.time_ns, before, after) > 0:
        return Agreement("no number", why="a time is zero")
    difference, drift = row.time_ns / statistics.median(row.ours) - 1, after / before - 1
    if abs(drift) > TOLERANCE:
        return Agreement("undecided", difference, drift, f"our own clock moved by {drift:+.1%} while the tool ran")
    return Agreement("differs" if abs(difference) > TOLERANCE else "agrees", difference, drift)


class Prepared:
    """The library's choice (or ``kernel``) on a problem, bound to its input sets, with our graph clock's sampler.

    ``cold``: as many sets as leave the L2 cold; else one.

    Raises:
        ValueError: no GPU, an unknown kernel, or one that cannot serve the problem.
    """

    def __init__(self, text: str, kernel: str | None, cold: bool) -> None:
        from flashmoe_science.dispatch.select import select
        from flashmoe_science.dispatch.table import committed_table
        from flashmoe_science.kernel import Config
        from flashmoe_science.measure.bench import bench_here
        from flashmoe_science.measure.clocks import graph_sampler
        from flashmoe_science.measure.inputs import Case, InputSets, make, sets_beyond
        from flashmoe_science.measure.request import of_kernel
        from flashmoe_science.measure.worker.callers import KernelCaller
        from flashmoe_science.operations import kernel_named, operation, parse_problem

        self.bench, problem = bench_here(), parse_problem(text)
        if self.bench.gpu is None:
            raise ValueError("the graph clock is the GPU's, and there is no NVIDIA GPU here")
        op = operation(problem.op)
        chosen = kernel or select(problem, self.bench.gpu, committed_table(), op.ours(), op.fallback()).kernel
        self.kernel, contract = kernel_named(chosen, problem.op), op.contract()
        if (reason := self.kernel.supports(problem, self.bench.gpu)) is not None:
            raise ValueError(f"kernel {chosen!r} cannot serve '{problem}': {reason}")
        self.config = of_kernel(self.kernel).chosen(problem, self.bench.gpu).config
        caller = KernelCaller(contract, problem, self.bench.gpu, self.kernel, Config.parse(self.config))
        sets = sets_beyond(self.bench.gpu.l2_bytes, problem.min_bytes()) if cold else 1
        bound = [caller.bind(make(contract, problem, self.bench.device, Case(42 + i)), "graph") for i in range(sets)]
        self.inputs = InputSets(tuple(bound), "cold" if cold else "warm")
        self.sampler = graph_sampler(self.bench, operator.call, self.inputs)

    def row(self, run: str, problem: str, tool: str, version: str, method: str) -> dict[str, Any]:
        """The fields of a row that has no time yet."""
        about = {"run": run, "problem": problem, "kernel": self.kernel.name, "config": self.config, "cache": self.inputs.cache}
        return about | {"tool": tool, "tool_version": version, "method": method, "time_ns": None}

    def sampled_around(self, tool: Callable[[], list[float]]) -> tuple[list[int], list[float]]:
        """Our samples before and after what another tool measures, once the board has settled; and the tool's."""

        def settled(seconds: float) -> list[int]:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                self.sampler.sample()
            return [round(self.sampler.sample()) for _ in range(_SAMPLES)]

        before = settled(1.0)
        found = tool()
        return before + settled(0.2), found


def triton_row(run: str, problem: str, kernel: str | None) -> CrossCheckRow:
    """do_bench_cudagraph compared with our clock, on one set of tensors."""
    import triton
    from triton.testing import do_bench_cudagraph

    made = Prepared(problem, kernel, cold=False)
    call = made.inputs.sets[0]
    ours, samples = made.sampled_around(lambda: [one * 1e6 for one in do_bench_cudagraph(call, return_mode="all")])
    fields = made.row(run, problem, TRITON, triton.__version__, "median of its replays of one set of tensors")
    found = {"time_ns": statistics.median(samples), "samples": [round(one) for one in samples], "ours": ours}
    return CrossCheckRow(**fields | found)


def cuda_bench_rows(run: str, problems: Sequence[str], kernel: str | None) -> Iterator[CrossCheckRow]:
    """cuda-bench compared with our clock: isolated executions on a cold cache, batches on a warm one.

    A short call would be paced by the host in a batch, and when isolated be drowned in its own start, so there an execution is
    one CUDA graph of some 2 ms of calls.
    """
    import cuda.bench as cuda_bench
    import torch
    from cuda.bench.results import BenchmarkResult

    from flashmoe_science.measure.clocks import capture

    done: dict[tuple[str, int], dict[str, Any]] = {}

    def measure(state: Any, way: str) -> None:
        index = state.get_int64("case")
        made = Prepared(problems[index], kernel, cold=way == "isolated")
        calls = 1 if made.sampler.sample() >= LONG_NS else made.sampler.calls
        turns = cycle(made.inputs.sets)
        graph = None if calls == 1 else capture(made.bench, operator.call, made.inputs, calls)
        stream = torch.cuda.ExternalStream(state.get_stream().addressof(), device=made.bench.device)

        def launch(_: Any = None) -> None:
            with torch.cuda.stream(stream):
                next(turns)() if graph is None else graph.replay()

        launch()  # fills the allocator's pool of this stream: cuda-bench blocks it, and an allocation would wait for it
        stream.synchronize()
        ours, _ = made.sampled_around(lambda: state.exec(launch, batched=way == "batch") or [])
        method = f"{way} executions, each of {calls} call{'s' * (calls != 1)}"
        done[way, index] = made.row(run, problems[index], CUDA_BENCH, str(cuda_bench.__version__), method)
        done[way, index] |= {"ours": ours, "calls": calls}

    for way in ("isolated", "batch"):
        bench = cuda_bench.register(lambda state, way=way: measure(state, way))
        bench.set_name(way).add_int64_axis("case", list(range(len(problems)))).set_timeout(3.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        cuda_bench.run_all_benchmarks(["crosscheck_clocks", "--jsonbin", str(path)])
        result = BenchmarkResult.from_json(path)
    for (way, index), fields in done.items():
        calls = fields.pop("calls")
        state = next(one for one in result[way] if int(one.point["case"]) == index)
        samples = [float(one) * 1e9 / calls for one in state.samples or ()]
        mean = state.summaries.get("nv/batch/time/gpu/mean") if way == "batch" else None
        time_ns = float(mean.value) * 1e9 / calls if mean is not None else statistics.median(samples) if samples else None
        yield CrossCheckRow(**fields | {"time_ns": time_ns, "samples": [round(one) for one in samples[:100]]})


def recorded(folder: Path) -> Iterator[CrossCheckRow]:
    """Every comparison that runs under a folder hold."""
    for run in read_runs(folder):
        rows = (row for row in run.rows if isinstance(row, OtherRow) and row.kind == "crosscheck")
        yield from (CrossCheckRow.model_validate(row.model_dump()) for row in rows)


def measured(problems: Sequence[str], kernel: str | None) -> Iterator[CrossCheckRow]:
    run = f"{datetime.now():%Y%m%dT%H%M%S}-crosscheck"
    yield from (triton_row(run, problem, kernel) for problem in problems)
    yield from cuda_bench_rows(run, problems, kernel)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", default=PROBLEMS)
    parser.add_argument("--kernel")
    parser.add_argument("--recorded", type=Path, metavar="FOLDER", help="judge the rows of recorded runs; measure nothing")
    parser.add_argument("--out", type=Path, help="also append the rows to this file, as JSON lines")
    asked = parser.parse_args()
    outcomes = set()
    for row in recorded(asked.recorded) if asked.recorded else measured(asked.problems, asked.kernel):
        found = agreement(row)
        outcomes.add(found.outcome)
        numbers = "" if found.difference is None else f" {found.difference:+.2%}, our drift {found.drift:+.2%}"
        print(f"{found.outcome}:{numbers} {row.tool}, {row.cache}, {row.kernel} on {row.problem} {found.why or ''}".rstrip())
        if asked.out:
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(row.model_dump_json() + "\n")
    return 3 if "differs" in outcomes else 0 if outcomes == {"agrees"} else 2


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ValueError as error:  # no GPU, or a kernel that cannot serve
        raise SystemExit(f"crosscheck: {error}") from None
