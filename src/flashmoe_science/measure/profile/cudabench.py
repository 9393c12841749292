"""NVIDIA's cuda-bench (NVBench for Python) on our calls, in a process of its own: it wants to run the program itself.

This module, given cases as JSON on its standard input, lets cuda-bench measure each twice, our graph clock before and after:

- isolated, on a cold cache: cuda-bench clears the L2 before each of its samples;
- in a batch, on a warm cache: its executions follow each other on one set of tensors.

What it executes is one call where a call is long. A short one would be paced by the host in a batch, and when isolated be
drowned in its own start, so there an execution is one CUDA graph of some 2 ms of calls, over as many sets of tensors as are
cold, or over one. One JSON object a finding is printed.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from flashmoe_science.measure.bench import Bench, Call, Candidate, bench_here, one_line
from flashmoe_science.measure.child import lines_from
from flashmoe_science.measure.inputs import InputSets, make_inputs
from flashmoe_science.measure.timing import beside, capture, graph_sampler
from flashmoe_science.records import Cache

TOOL = "cuda-bench"
LONG_NS = 300_000  # a call alone: its start and end, some 2 us, are well under 1% of it
_MODULE = "flashmoe_science.measure.profile.cudabench"
_OURS = 50  # samples on each side, some 2 ms each
_KEPT = 100  # of cuda-bench's samples, evenly spread; its figure is the median of all
_TIMEOUT_S = 3.0  # of one case; cuda-bench stops earlier where its noise is under 0.5%
_BATCH_MEAN = "nv/batch/time/gpu/mean"
_ISOLATED, _BATCH = "isolated", "batch"
_WAYS: dict[str, tuple[Cache, str]] = {
    _ISOLATED: ("cold", "median of isolated executions, the L2 cleared before each"),
    _BATCH: ("warm", "mean of a batch of executions"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel with one config on one problem, as text."""

    problem: str
    kernel: str
    config: str


def measure(cases: Sequence[Case], seed: int) -> Iterator[dict[str, Any]]:
    """Fields of a CrossCheckRow for each case and cache. Where nothing can be measured, the fields say why."""
    left = [(case, cache) for case in cases for cache, _ in _WAYS.values()]
    try:
        for line in lines_from(_MODULE, json.dumps({"seed": seed, "cases": [dataclasses.asdict(case) for case in cases]}), {}):
            found = json.loads(line)
            if "absent" in found:
                raise RuntimeError(found["absent"])
            left = [(case, cache) for case, cache in left if (case.problem, cache) != (found["problem"], found["cache"])]
            yield found
    except RuntimeError as error:
        for case, cache in left:
            yield _finding(case, cache, tool_version="", method="", reason=str(error))


def _finding(case: Case, cache: Cache, *, tool_version: str, method: str, reason: str | None = None) -> dict[str, Any]:
    return {
        **dataclasses.asdict(case),
        "cache": cache,
        "tool": TOOL,
        "tool_version": tool_version,
        "method": method,
        "time_ns": None,
        "reason": reason,
    }


class _Under:
    """What cuda-bench calls back, and what our clock said meanwhile."""

    def __init__(self, bench: Bench, cases: Sequence[Case], seed: int) -> None:
        self.bench, self.cases, self.seed = bench, cases, seed
        self.ours: dict[tuple[str, int], list[int]] = {}
        self.calls: dict[tuple[str, int], int] = {}  # in one execution

    def isolated(self, state: Any) -> None:
        self._measure(state, _ISOLATED)

    def batch(self, state: Any) -> None:
        self._measure(state, _BATCH)

    def _measure(self, state: Any, way: str) -> None:
        index = state.get_int64("case")
        try:
            self._beside(state, way, index)
        except Exception as error:  # an exception would end cuda-bench's whole run
            state.skip(one_line(error))

    def _beside(self, state: Any, way: str, index: int) -> None:
        """Our samples, cuda-bench's, our samples, all on the same tensors."""
        import torch

        inputs, call = self._prepared(self.cases[index], way)
        sampler = graph_sampler(self.bench, call, inputs)
        execute, calls = self._execution(call, inputs, sampler.calls, sampler.sample())
        stream = torch.cuda.ExternalStream(state.get_stream().addressof(), device=self.bench.device)
        with torch.cuda.stream(stream):
            execute()  # fills the allocator's pool of this stream: cuda-bench blocks it, and an allocation would wait for it
        stream.synchronize()

        def launcher(launch: Any) -> None:
            with torch.cuda.stream(stream):
                execute()

        def theirs() -> list[int]:
            state.exec(launcher, batched=way == _BATCH)
            return []  # cuda-bench gives its numbers at the end of its run

        self.ours[way, index], _ = beside(sampler.sample, theirs, _OURS)
        self.calls[way, index] = calls

    def _prepared(self, case: Case, way: str) -> tuple[InputSets, Call]:
        from flashmoe_science.kernel import Config
        from flashmoe_science.operations import kernel_named, parse_problem

        l2 = self.bench.gpu.l2_bytes if self.bench.gpu is not None and way == _ISOLATED else 0
        inputs = make_inputs(parse_problem(case.problem), self.bench.device, self.seed, l2)
        if way == _ISOLATED and inputs.cache != "cold":
            raise ValueError("it is too small for as many sets of tensors as a cold cache takes")
        return inputs, Candidate(kernel_named(case.kernel), Config.parse(case.config)).planned(inputs.first)

    def _execution(self, call: Call, inputs: InputSets, calls: int, call_ns: float) -> tuple[Callable[[], object], int]:
        """What cuda-bench is to execute, and how many calls that is."""
        if call_ns >= LONG_NS:
            sets = cycle(inputs.sets)
            return (lambda: call(next(sets))), 1
        return capture(self.bench, call, inputs, calls).replay, calls


def main(seed: int, cases: Sequence[Case]) -> None:
    """Measure here and print."""
    try:
        import cuda.bench as cuda_bench

        register, run, version = cuda_bench.register, cuda_bench.run_all_benchmarks, str(cuda_bench.__version__)
    except ImportError as error:
        print(json.dumps({"absent": f"cuda-bench cannot be used here: {one_line(error)}"}), flush=True)
        return
    under = _Under(bench_here(), cases, seed)
    isolated, batch = register(under.isolated), register(under.batch)
    for one, name in ((isolated, _ISOLATED), (batch, _BATCH)):
        one.set_name(name).add_int64_axis("case", list(range(len(cases)))).set_timeout(_TIMEOUT_S)
    isolated.set_criterion_param_float64("min-time", 0.2)
    # A batch is preceded by isolated samples, of which no use is made: as few as cuda-bench will take.
    batch.set_min_samples(4).set_criterion_param_float64("min-time", 0.01).set_criterion_param_float64("max-noise", 1.0)
    batch.set_batch_target_time(0.2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        device = under.bench.device.index or 0
        run([_MODULE, "--devices", str(device), "--jsonbin", str(path)])
        for finding in _findings(path, under, version):
            print(json.dumps(finding), flush=True)


def _findings(path: Path, under: _Under, version: str) -> Iterator[dict[str, Any]]:
    from cuda.bench.results import BenchmarkResult

    result = BenchmarkResult.from_json(path)
    for way, (cache, method) in _WAYS.items():
        for state in result[way]:
            index = int(state.point["case"])
            calls = under.calls.get((way, index), 1)
            what = "one call" if calls == 1 else f"a CUDA graph of {calls} calls"
            finding = _finding(
                under.cases[index],
                cache,
                tool_version=version,
                method=f"{method}; an execution is {what}",
                reason=state.skip_reason if state.is_skipped else None,
            )
            if not state.is_skipped:
                finding |= {"ours": under.ours[way, index], **_times(way, state, calls)}
            yield finding


def _times(way: str, state: Any, calls: int) -> Mapping[str, Any]:
    """cuda-bench's figure and samples, which it gives in seconds an execution."""
    if way == _BATCH:
        mean = state.summaries.get(_BATCH_MEAN)
        return {"time_ns": float(mean.value) * 1e9 / calls} if mean is not None else {"reason": "it gave no batch time"}
    samples = [float(one) * 1e9 / calls for one in state.samples or ()]
    if not samples:
        return {"reason": "it gave no samples"}
    step = -(-len(samples) // _KEPT)
    return {"time_ns": statistics.median(samples), "samples": [round(one) for one in samples[::step]]}


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of kernels; what matters ends as a reason
    given = json.load(sys.stdin)
    main(given["seed"], [Case(**case) for case in given["cases"]])
