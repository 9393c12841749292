"""The two clocks, and samples taken in pairs.

Graph: many calls in one CUDA graph, its replay timed by CUDA events: device time alone. Eager: the wall clock around calls back
to back, with a synchronisation at the end: what a user waits. A sample is the mean of many calls. Candidate and rival alternate
A B B A, so that a drift of the clocks affects both alike.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

import torch

from flashmoe_science.measure.bench import Bench, one_line
from flashmoe_science.measure.inputs import MAX_SETS, InputSets
from flashmoe_science.records import Clock

T = TypeVar("T")
Sample = Callable[[], float]  # takes one sample; nanoseconds a call

GRAPH_SAMPLE_NS = 2_000_000  # a sample's length, about; a replay starts some 5 us after its event, 0.3% of it
EAGER_SAMPLE_NS = 3_000_000
_FIRST_CALLS = 16  # of the first, trial capture
_LONGEST_ROUND_NS = 100_000_000  # through all cold input sets, in one sample
_CAPTURES = 3  # at most: a trial, one of the right length, and one more where the trial misled
_WARM_UP = 10
_MAX_EAGER_CALLS = 2000
_WIDTH = 0.004
_EXPECTED_WITHIN = 2.0  # the full bench may be at most twice, at least half, what the quick bench found


class CannotTime(RuntimeError):
    """A clock cannot time the kernel; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """One kernel ready to be sampled. ``calls`` is how many calls a sample holds."""

    clock: Clock
    calls: int
    sample: Sample


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many pairs are sampled: at least ``min_pairs``; then until twice the standard error of the mean log-ratio is under
    ``_WIDTH``, or ``max_pairs``, or ``seconds`` have passed. It decides the number of pairs only; the judge computes
    intervals."""

    min_pairs: int
    max_pairs: int
    seconds: float


QUICK_SAMPLES = 3  # of each candidate alone, to choose among them
FULL = Sampling(min_pairs=12, max_pairs=40, seconds=0.8)
FEW = Sampling(min_pairs=6, max_pairs=16, seconds=0.4)  # the full bench of `--quick`
FULL_CPU = Sampling(min_pairs=12, max_pairs=40, seconds=2.0)  # samples are longer there
FEW_CPU = Sampling(min_pairs=6, max_pairs=16, seconds=0.8)


def paired(
    a: Sample, b: Sample, sampling: Sampling, before_pair: Callable[[int], None] = lambda index: None
) -> tuple[list[int], list[int]]:
    """Sample A B B A A B B A ... and return the two lists, pair by pair, in whole nanoseconds. ``before_pair(index)`` is called
    ahead of each pair."""
    samples_a: list[int] = []
    samples_b: list[int] = []
    began = time.monotonic()
    with _no_collection():
        while not _enough(samples_a, samples_b, sampling, time.monotonic() - began):
            index = len(samples_a)
            before_pair(index)
            turns = ((samples_a, a), (samples_b, b))
            for samples, take in turns if index % 2 == 0 else turns[::-1]:
                samples.append(round(take()))
    return samples_a, samples_b


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: in a sample its time would count for the kernel, in a capture it may free a graph."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _enough(a: list[int], b: list[int], sampling: Sampling, elapsed: float) -> bool:
    pairs = len(a)
    if pairs < sampling.min_pairs:
        return False
    if pairs >= sampling.max_pairs or elapsed >= sampling.seconds:
        return True
    if min(*a, *b) <= 0:
        return True  # there is no ratio; the run refuses such samples
    ratios = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    return 2 * statistics.stdev(ratios) / math.sqrt(pairs) < _WIDTH


def graph_sampler(bench: Bench, call: Callable[[T], object], inputs: InputSets[T]) -> Sampler:
    """Capture ``call`` over the input sets in turn, as often as a sample needs, in one CUDA graph. Raises CannotTime.

    Cold sets are each called equally often, so that each is gone from the L2 when its turn comes again. Where a round takes too
    long, as few as a sample needs are called, each once, and the L2 is flushed before each sample instead.
    """

    def whole_rounds(calls: float) -> int:
        return math.ceil(calls / len(inputs.sets)) * len(inputs.sets)

    cold = inputs.cache == "cold"
    single = _replays(bench, call, inputs, 1, flush=cold)
    single()
    alone = single()
    if alone >= GRAPH_SAMPLE_NS:
        return Sampler("graph", 1, single)
    if alone * len(inputs.sets) >= _LONGEST_ROUND_NS:
        few = math.ceil(GRAPH_SAMPLE_NS / alone)
        return Sampler("graph", few, _replays(bench, call, inputs, few, flush=cold))
    calls = whole_rounds(_FIRST_CALLS)
    for _ in range(_CAPTURES):
        sample = _replays(bench, call, inputs, calls)
        sample()  # the first replay uploads the graph
        took = sample()
        if took * calls >= GRAPH_SAMPLE_NS:
            break
        # Only a replay shows the device's time: eager calls may be limited by the host.
        calls = min(whole_rounds(1.1 * GRAPH_SAMPLE_NS / max(took, 1.0)), whole_rounds(MAX_SETS))
    return Sampler("graph", calls, sample)


def capture(bench: Bench, call: Callable[[T], object], inputs: InputSets[T], calls: int) -> torch.cuda.CUDAGraph:
    """One CUDA graph of ``calls`` calls over the input sets in turn. Raises CannotTime: the capture failed; the message gives
    the reason."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(torch.cuda.Stream(bench.device)):
            for one in inputs.sets[: max(2, calls)]:
                call(one)  # nothing may be compiled, loaded, autotuned or planned for these inputs inside a capture
            torch.cuda.synchronize(bench.device)
            torch.cuda.empty_cache()  # a capture has memory of its own, and may not free what is kept of earlier calls
            with _no_collection():  # torch.cuda.graph collects garbage first instead, which takes a tenth of a second
                graph.capture_begin()
                try:
                    for _, one in zip(range(calls), cycle(inputs.sets), strict=False):
                        call(one)
                finally:
                    graph.capture_end()
        torch.cuda.synchronize(bench.device)
    except Exception as error:
        raise CannotTime(f"its CUDA graph could not be captured: {one_line(error)}") from error
    return graph


def _replays(bench: Bench, call: Callable[[T], object], inputs: InputSets[T], calls: int, flush: bool = False) -> Sample:
    graph = capture(bench, call, inputs, calls)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    assert bench.gpu is not None
    twice_l2 = torch.empty(2 * bench.gpu.l2_bytes if flush else 0, dtype=torch.uint8, device=bench.device)

    def sample() -> float:
        if flush:
            twice_l2.zero_()  # in the stream before the first event
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last) * 1e6 / calls)

    return sample


def eager_sampler(bench: Bench, call: Callable[[T], object], inputs: InputSets[T], target_ns: int = EAGER_SAMPLE_NS) -> Sampler:
    """A sampler of back-to-back calls on the wall clock, as many a sample as take about ``target_ns``. All samplers rotate
    through the same input sets."""
    clock = time.perf_counter_ns

    def timed(calls: int) -> float:
        batch = [inputs.next() for _ in range(calls)]
        bench.synchronize()
        began = clock()
        for one in batch:
            call(one)
        bench.synchronize()
        return (clock() - began) / calls

    # The fastest of a few calls: by a stray slow call a sample would get too few. A long call needs no fine estimate:
    # a kernel of seconds would be called ten times to learn that a sample holds one call.
    estimate = math.inf
    for index in range(_WARM_UP):
        estimate = max(1.0, min(estimate, timed(1)))
        if index and estimate >= 2 * EAGER_SAMPLE_NS:
            break
    calls = min(_MAX_EAGER_CALLS, math.ceil(target_ns / estimate))
    return Sampler("eager", calls, lambda: timed(calls))


def impossible(samples: Sequence[int], floor: float, expected: float | None) -> str | None:
    """Why these samples (nanoseconds a call) are no measurement, or None where they may be one. ``floor`` is the least time
    that the chip could take (``hardware.floor``), ``expected`` the median of a quick bench."""
    if min(samples) <= 0:
        return "a sample took no time at all"
    median = statistics.median(samples)
    if median < floor:
        return f"{median:.0f} ns a call is below the {floor:.0f} ns that the chip's arithmetic and bandwidth allow"
    if expected is not None and not expected / _EXPECTED_WITHIN <= median <= expected * _EXPECTED_WITHIN:
        return f"the full bench found {median:.0f} ns a call where the quick bench found {expected:.0f} ns"
    return None
