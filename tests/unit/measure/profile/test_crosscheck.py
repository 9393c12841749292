"""Our clock beside another tool's: the order of things, what a row holds, and tools that are absent, fail or skip.

A stand-in plays cuda-bench, whose own module wants a GPU to be imported; the clock is played too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from flashmoe_science.measure.profile.cudabench import Case
from flashmoe_science.measure.session import Progress
from flashmoe_science.measure.timing import Sampler, beside

from flashmoe_science.cli.main import main as flashmoe
from flashmoe_science.judge.crosscheck import agreements
from flashmoe_science.measure import timing
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.profile import crosscheck, cudabench
from flashmoe_science.problem import ProblemError
from flashmoe_science.store import RunWriter, read_run

CPU = Bench(torch.device("cpu"), None)
CASES = [Case("attn b1 h1 q64 d64 fp32", "sdpa", ""), Case("attn b1 h1 q128 d64 fp32", "sdpa", "")]


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played boards need no time to settle."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(timing, "_SETTLES_S", 0.0)
        monkeypatch.setattr(timing, "_RESETTLES_S", 0.0)


def test_ours_are_taken_before_and_after_and_the_unsettled_ones_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SETTLES_S", 1.0)
    monkeypatch.setattr(timing, "_RESETTLES_S", 0.05)
    order: list[str] = []

    def ours() -> float:
        order.append("ours")
        return float(len(order))

    def theirs() -> list[int]:
        order.append("theirs")
        return [7]

    taken, found = beside(ours, theirs, samples=3, now=lambda: len(order) * 0.02)
    at = order.index("theirs")
    assert at == 50 + 3  # a second of them, then those that count
    assert order[at + 1 :] == ["ours"] * (3 + 3)
    assert found == [7]
    assert taken == [51, 52, 53, at + 5, at + 6, at + 7]


# The parent: findings become rows, whatever happens to the process.


def child(monkeypatch: pytest.MonkeyPatch, *lines: dict[str, Any], dies: str | None = None) -> None:
    def said(module: str, text: str, settings: Mapping[str, str]) -> Iterator[str]:
        yield from map(json.dumps, lines)
        if dies:
            raise RuntimeError(dies)

    monkeypatch.setattr(cudabench, "lines_from", said)


def finding(case: Case, cache: str) -> dict[str, Any]:
    return {
        "problem": case.problem, "kernel": case.kernel, "config": case.config, "cache": cache, "tool": "cuda-bench",
        "tool_version": "0.3.0", "method": "a way", "time_ns": 1000.0, "ours": [1000] * 10, "reason": None,
    }  # fmt: skip


def test_an_absent_tool_leaves_a_reason_for_every_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, {"absent": "cuda-bench cannot be used here: no module"})
    found = list(cudabench.measure(CASES, 42))
    assert [(one["problem"], one["cache"], one["time_ns"]) for one in found] == [
        (case.problem, cache, None) for case in CASES for cache in ("cold", "warm")
    ]
    assert {one["reason"] for one in found} == {"cuda-bench cannot be used here: no module"}


def test_a_process_that_dies_keeps_what_it_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, finding(CASES[0], "cold"), finding(CASES[1], "cold"), dies="it ended with code -11")
    found = {(one["problem"], one["cache"]): (one["time_ns"], one["reason"]) for one in cudabench.measure(CASES, 42)}
    assert found == {
        (CASES[0].problem, "cold"): (1000.0, None),
        (CASES[1].problem, "cold"): (1000.0, None),
        (CASES[0].problem, "warm"): (None, "it ended with code -11"),
        (CASES[1].problem, "warm"): (None, "it ended with code -11"),
    }


def test_rows_of_both_tools_are_kept_and_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, played_clock: None) -> None:
    """Of one tool that measures, and one that is not there."""
    monkeypatch.setattr(crosscheck, "triton_samples", lambda call, inputs: [1010, 5000, 1010])
    child(monkeypatch, {"absent": "cuda-bench is not there"})
    steps: list[Progress] = []
    check = crosscheck.CrossCheck(CPU, crosscheck.problems_of([CASES[0].problem]), None, ["flashmoe", "crosscheck"])
    with RunWriter(tmp_path / "run.jsonl") as writer:
        check.run(writer, steps.append)
    run = read_run(tmp_path / "run.jsonl")
    assert run.complete
    assert run.header.suite == "crosscheck"
    triton, cold, warm = agreements([run])
    assert (triton.said, triton.cache, triton.kernel) == ("agrees", "warm", "sdpa")
    assert triton.difference == pytest.approx(0.01)
    assert [(one.said, one.why) for one in (cold, warm)] == [("no number", "cuda-bench is not there")] * 2
    assert [(step.done, step.total) for step in steps] == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_kernel_that_fails_is_a_reason_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, played_clock: None
) -> None:
    def out_of_memory(call: object, inputs: object) -> list[int]:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(crosscheck, "triton_samples", out_of_memory)
    child(monkeypatch, finding(CASES[0], "cold"), finding(CASES[0], "warm"))
    check = crosscheck.CrossCheck(CPU, crosscheck.problems_of([CASES[0].problem]), None, ["flashmoe", "crosscheck"])
    with RunWriter(tmp_path / "run.jsonl") as writer:
        check.run(writer, lambda step: None)
    triton, *others = agreements([read_run(tmp_path / "run.jsonl")])
    assert (triton.said, triton.why) == ("no number", "RuntimeError: CUDA out of memory")
    assert [one.said for one in others] == ["agrees", "agrees"]


# The child: what cuda-bench is given to execute, and its figures in our units.


@pytest.fixture
def played_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our clock says 1000 ns a call, 4 calls a sample; a graph of them is a plain loop."""
    for module in (crosscheck, cudabench):
        monkeypatch.setattr(module, "graph_sampler", lambda bench, call, inputs: Sampler("graph", 4, lambda: 1000.0))


class FakeState:
    """One case of one benchmark: ``exec`` runs the launcher as often as it has times, and keeps them for the result."""

    def __init__(self, case: int, seconds: list[float]) -> None:
        self.point, self.samples, self.summaries = {"case": str(case)}, seconds, {}
        self.is_skipped, self.skip_reason = False, None
        self._case = case

    def get_int64(self, name: str) -> int:
        assert name == "case"
        return self._case

    def get_stream(self) -> Any:
        return SimpleNamespace(addressof=lambda: 0)

    def skip(self, reason: str) -> None:
        self.is_skipped, self.skip_reason = True, reason

    def exec(self, launcher: Callable[[Any], None], *, batched: bool) -> None:
        for _ in self.samples:
            launcher(None)
        if batched:
            mean = sum(self.samples) / len(self.samples)
            self.summaries = {"nv/batch/time/gpu/mean": SimpleNamespace(value=mean)}


@pytest.fixture
def fake_cuda_bench(monkeypatch: pytest.MonkeyPatch, played_clock: None) -> dict[str, list[FakeState]]:
    """cuda.bench in a few lines. Returns the states that each benchmark will be given; a test fills in the times."""
    states: dict[str, list[FakeState]] = {"isolated": [], "batch": []}
    registered: dict[str, Callable[[Any], None]] = {}

    class Benchmark:
        def __init__(self, function: Callable[[Any], None]) -> None:
            self.function = function

        def set_name(self, name: str) -> Benchmark:
            registered[name] = self.function
            return self

        def __getattr__(self, name: str) -> Callable[..., Benchmark]:
            return lambda *values: self

    def run(arguments: list[str]) -> None:
        Path(arguments[arguments.index("--jsonbin") + 1]).touch()
        for name, function in registered.items():
            for state in states[name]:
                function(state)

    bench, results, cuda = ModuleType("cuda.bench"), ModuleType("cuda.bench.results"), ModuleType("cuda")
    bench.register, bench.run_all_benchmarks, bench.__version__ = Benchmark, run, "0.3.0"  # type: ignore[attr-defined]
    results.BenchmarkResult = SimpleNamespace(from_json=lambda path: states)  # type: ignore[attr-defined]
    cuda.bench = bench  # type: ignore[attr-defined]
    for module in (cuda, bench, results):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    monkeypatch.setattr(cudabench, "bench_here", lambda: CPU)
    loop = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(cudabench, "capture", lambda bench, call, inputs, calls: loop)
    return states


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_a_batch_of_graphs_is_counted_by_the_call(
    fake_cuda_bench: dict[str, list[FakeState]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A graph of 4 calls took 4.04 us on the mean, so a call took 1010 ns."""
    fake_cuda_bench["batch"] = [FakeState(1, [4.0e-6, 4.08e-6])]
    cudabench.main(42, CASES)
    (found,) = printed(capsys)
    assert (found["problem"], found["cache"], found["tool_version"]) == (CASES[1].problem, "warm", "0.3.0")
    assert found["time_ns"] == pytest.approx(1010.0)
    assert found["ours"] == [1000] * 100
    assert "a CUDA graph of 4 calls" in found["method"]


def test_a_long_call_is_executed_alone(
    fake_cuda_bench: dict[str, list[FakeState]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudabench, "graph_sampler", lambda bench, call, inputs: Sampler("graph", 4, lambda: 400_000.0))
    fake_cuda_bench["batch"] = [FakeState(0, [404e-6])]
    cudabench.main(42, CASES)
    (found,) = printed(capsys)
    assert found["time_ns"] == pytest.approx(404_000.0)
    assert found["method"].endswith("an execution is one call")


def test_an_isolated_figure_is_the_median_and_few_of_its_samples_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    state = FakeState(0, [4e-6] * 600 + [9e-6] * 399)
    found = cudabench._times("isolated", state, 4)
    assert found["time_ns"] == pytest.approx(1000.0)
    assert 50 <= len(found["samples"]) <= 100
    assert set(found["samples"]) == {1000, 2250}
    assert cudabench._times("isolated", FakeState(0, []), 4) == {"reason": "it gave no samples"}


def test_what_cannot_be_cold_is_said_not_to_be(
    fake_cuda_bench: dict[str, list[FakeState]], capsys: pytest.CaptureFixture[str]
) -> None:
    """On the stand-in's bench no cache is managed, so none is cold; the batch goes on."""
    fake_cuda_bench |= {"isolated": [FakeState(0, [1e-6])], "batch": [FakeState(0, [4e-6])]}
    cudabench.main(42, CASES)
    cold, warm = printed(capsys)
    assert (cold["cache"], cold["time_ns"]) == ("cold", None)
    assert "too small for as many sets of tensors as a cold cache takes" in cold["reason"]
    assert warm["time_ns"] == pytest.approx(1000.0)


def test_without_cuda_bench_the_child_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    cudabench.main(42, CASES)
    (said,) = printed(capsys)
    assert said["absent"].startswith("cuda-bench cannot be used here: ")


def test_problems_are_attention_and_by_default_more_than_five() -> None:
    assert len(crosscheck.problems_of([])) > 5
    with pytest.raises(ProblemError):
        crosscheck.problems_of(["moe t16 e4 k2 d64 f64 bf16"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        flashmoe(["crosscheck"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("flashmoe: flashmoe crosscheck needs an NVIDIA GPU")


@pytest.mark.gpu
def test_on_a_gpu_triton_agrees(tmp_path: Path) -> None:
    """The real tools; cuda-bench where it is installed."""
    from flashmoe_science.measure.bench import bench_here

    check = crosscheck.CrossCheck(bench_here(), crosscheck.problems_of([crosscheck.PROBLEMS[3]]), None, ["flashmoe"])
    with RunWriter(tmp_path / "run.jsonl") as writer:
        check.run(writer, lambda step: None)
    for one in agreements([read_run(tmp_path / "run.jsonl")]):
        assert one.said == "agrees" or (one.tool == "cuda-bench" and "cannot be used here" in str(one.why)), one
