"""Sampling in pairs, with a clock that the test holds."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from flashmoe_science.measure import clocks
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.clocks import Sampling, eager_sampler, graph_sampler, impossible, paired
from flashmoe_science.measure.inputs import InputSets

CPU = Bench(torch.device("cpu"), None)


def test_samples_alternate_a_b_b_a() -> None:
    order, ahead = list[str](), list[tuple[int, int]]()

    def take(which: str, ns: float) -> float:
        order.append(which)
        return ns

    def before(index: int) -> None:
        ahead.append((index, len(order)))

    a, b = paired(lambda: take("A", 1000.0), lambda: take("B", 2000.0), Sampling(min_pairs=5, max_pairs=5, seconds=1e9), before)
    assert "".join(order) == "ABBAABBAAB"
    assert ahead[:3] == [(0, 0), (1, 2), (2, 4)], "something may be done ahead of every pair"
    assert (a, b) == ([1000] * 5, [2000] * 5)


@pytest.mark.parametrize(("times", "samples"), [([1000.0], 12), ([1000.0, 1500.0, 800.0], 40)], ids=["steady", "noise"])
def test_it_stops_once_the_ratio_is_steady_between_the_least_and_the_most(times: list[float], samples: int) -> None:
    taken = itertools.cycle(times)
    a, _ = paired(lambda: next(taken), lambda: 1000.0, Sampling(min_pairs=12, max_pairs=40, seconds=1e9))
    assert len(a) == samples


def test_the_garbage_collector_rests_during_samples_and_is_restored_after_a_failure() -> None:
    seen = []

    def sample() -> float:
        seen.append(gc.isenabled())
        if len(seen) == 3:
            raise RuntimeError("a kernel died")
        return 1.0

    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="died"):
        paired(sample, sample, Sampling(4, 4, 1e9))
    assert seen == [False] * 3
    assert gc.isenabled()


def test_samplers_of_the_same_inputs_share_their_turns() -> None:
    """A set that one kernel has just used would be in the host's cache for the next: each goes on where the other stopped."""
    sets, called = InputSets((0, 1, 2), "cold"), list[int]()
    samplers = [eager_sampler(CPU, called.append, sets, target_ns=1) for _ in range(2)]
    called.clear()
    for sampler in (*samplers, *reversed(samplers)):
        sampler.sample()
    assert called == [(called[0] + step) % 3 for step in range(4)]


@pytest.mark.parametrize(
    ("sets", "cache", "ns", "calls", "flushed"),
    [
        (5000, "cold", 3_000.0, 5000, False),  # a whole round, and not less
        (5000, "cold", 500_000.0, 4, True),  # a round would take 2.5 s
        (5000, "cold", 2_500_000.0, 1, True),
        (3, "cold", 500_000.0, 6, False),
        (1, "warm", 2_500_000.0, 1, False),
        (1, "warm", 500_000.0, 16, False),
    ],
)
def test_a_graph_sample_is_a_whole_round_or_as_few_calls_behind_a_flushed_cache(
    sets: int, cache: str, ns: float, calls: int, flushed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool]] = []

    def replays(bench: Bench, call: object, inputs: InputSets, calls: int, flush: bool = False) -> clocks.Sample:
        asked.append((calls, flush))
        return lambda: ns

    monkeypatch.setattr(clocks, "_replays", replays)
    sampler = graph_sampler(CPU, lambda inputs: None, InputSets((0,) * sets, cache))  # type: ignore[arg-type]
    assert sampler.calls >= calls if not flushed else sampler.calls == calls
    assert sampler.calls % sets == 0 or flushed
    assert asked[-1] == (sampler.calls, flushed)
    assert max(calls for calls, _ in asked) * ns < 1e9, "a trial may not take longer than what it saves"


@pytest.mark.parametrize(
    ("samples", "floor", "expected", "words"),
    [
        ([100, 0, 100], 0.0, None, "took no time"),
        ([100, 100, 100], 150.0, None, "below the 150 ns"),
        ([100, 100, 100], 0.0, 201.0, "where the quick bench found 201 ns"),
        ([100, 100, 100], 0.0, 49.0, "where the quick bench found 49 ns"),
        ([100, 90, 300], 99.0, 60.0, None),
    ],
)
def test_impossible_samples_are_refused(samples: list[int], floor: float, expected: float | None, words: str | None) -> None:
    reason = impossible(samples, floor, expected)
    assert reason is None if words is None else words in str(reason)


@pytest.mark.gpu
def test_a_capture_takes_the_memory_that_is_kept_of_earlier_calls() -> None:
    torch.cuda.empty_cache()
    max_pairs = int(0.6 * torch.cuda.mem_get_info()[0])
    kept = torch.empty(max_pairs, dtype=torch.int8, device="cuda")
    del kept  # PyTorch keeps its memory; a graph cannot use it
    bench = Bench(torch.device("cuda"), None)
    graph = clocks.capture(bench, lambda _: torch.empty(max_pairs, dtype=torch.int8, device="cuda"), InputSets((0,), "cold"), 1)
    graph.replay()
    torch.cuda.synchronize()
    del graph
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_a_call_that_plans_for_inputs_as_it_first_meets_them_is_captured() -> None:
    inputs = InputSets(tuple(torch.ones(1, device="cuda") * number for number in range(5)), "cold")
    planned: dict[int, float] = {}

    def call(one: torch.Tensor) -> torch.Tensor:
        if id(one) not in planned:
            planned[id(one)] = float(one)  # waits for the host
        return one + planned[id(one)]

    clocks.capture(Bench(torch.device("cuda"), None), call, inputs, 7).replay()
    torch.cuda.synchronize()
