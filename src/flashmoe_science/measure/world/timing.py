"""Times of the implementations of a problem on several ranks: samples in turn, on both clocks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from flashmoe_science.measure.bench import conditions, one_line
from flashmoe_science.measure.session import Session
from flashmoe_science.measure.world.checks import Ready
from flashmoe_science.measure.world.ranks import World
from flashmoe_science.ops.distributed import Results
from flashmoe_science.problem import DistributedProblem
from flashmoe_science.records import Cache, Clock

_SAMPLE_NS, _MAX_CALLS = 2e7, 200  # of a sample, which is long enough for the GPU's clock to settle
_MIN_ROUNDS, _MAX_ROUNDS, _QUICK_ROUNDS = 12, 24, 6
_ROUNDS_S = 2.0  # of a problem on a clock; _MIN_ROUNDS may take longer
_GRAPH_NS = 1e6  # a shorter call of ours may be mostly the host's time: all are timed in graphs too


class Timing:
    """One problem on all ranks, timed."""

    def __init__(self, world: World, session: Session, problem: DistributedProblem) -> None:
        self.world, self.session, self.problem = world, session, problem
        self._seconds, self._conditions = 0.0, dict[str, Any]()

    def time(self, ready: Sequence[Ready]) -> None:
        """Write the rows of all implementations: by eager calls and, where those are short, in CUDA graphs."""
        quick = [one for one in self._sampled(ready, "eager", 1) if not one.is_control]
        rounds = self._sized(quick)
        self._record(self._sampled(quick, "eager", rounds), "eager")
        is_short = any(one.implementation.origin == "ours" and min(one.slowest) < _GRAPH_NS for one in quick)
        if self.world.bench.gpu is not None and is_short:
            captured = [made for one in quick if one.implementation.capturable and (made := self._captured(one)) is not None]
            self._record(self._sampled(captured, "graph", rounds), "graph")

    def _sized(self, quick: Sequence[Ready]) -> int:
        """Set how many calls a sample of each implementation holds, by its quick time. Returns the number of rounds."""
        for one in quick:
            one.calls = max(1, min(_MAX_CALLS, math.ceil(_SAMPLE_NS / max(1, min(one.slowest)))))
        a_round = sum(one.calls * min(one.slowest) for one in quick) / 1e9
        fit = int(_ROUNDS_S / max(a_round, 1e-9))
        return _QUICK_ROUNDS if self.session.request.quick else max(_MIN_ROUNDS, min(_MAX_ROUNDS, fit))

    def _captured(self, one: Ready) -> Ready | None:
        """The calls of a sample as one CUDA graph, None where they cannot be captured."""
        graph, reason, kept = torch.cuda.CUDAGraph(), "", list[Results]()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL asks for events on a thread of its own
                for _ in range(one.calls):
                    kept[:] = [one.call()]
        except RuntimeError as error:
            reason = one_line(error)
        if reason := self.world.first_of(reason):
            self.session.note(f"by {one.implementation.config}: it is in no graph: {reason}", self.problem, one.entry.name)
            return None

        def replay() -> Results:
            graph.replay()
            return kept[0]

        return replace(one, call=replay)

    def _sampled(self, ready: Sequence[Ready], clock: Clock, rounds: int) -> list[Ready]:
        """Sample all in each round, the first of ours twice: the control. Then compare their results.

        The order of a round is drawn, the same on all ranks: under a power limit, the GPU's clock in a sample depends on what
        ran before it, and in an alternating order each implementation would follow the same two.
        """
        first = next((one for one in ready if one.implementation.origin == "ours"), None)
        every = [*ready, *([replace(first, is_control=True)] if first else [])]
        samples: list[list[int]] = [[] for _ in every]
        world, before, began = self.world, self.world.bench.telemetry(), time.monotonic()
        for n in range(rounds + 1):  # the first warms up
            self.session.show_progress(f"{self.problem}: {clock} clock, round {n} of {rounds}")
            for one, own in Random(n).sample(list(zip(every, samples, strict=True)), len(every)):
                took = world.time(one.implementation, one.call, one.calls if clock == "eager" else 1)
                own += [round(took / one.calls)] if n else []
        self._seconds, after = time.monotonic() - began, world.bench.telemetry()
        self._conditions = _joined(world.gather(conditions(before, after)))
        timed = []
        for one, series in zip(every, zip(*world.gather(samples), strict=True), strict=True):
            timed.append(replace(one, by_rank=list(series[: 1 if one.implementation.single_gpu else None])))
        return [one for one in timed if self._repeats(one, clock)]

    def _repeats(self, one: Ready, clock: Clock) -> bool:
        """Whether one more call of ours gives the bits of the first call on every rank; if not, its samples are void."""
        if one.implementation.origin != "ours":
            return True
        repeated = one.implementation.own_part(one.call_in_context())
        self.world.bench.synchronize()
        same = all(torch.equal(a, b) for a, b in zip(repeated, one.results, strict=True))
        reason = self.world.first_of("" if same else f"rank {self.world.rank}: a call on the {clock} clock has other bits")
        if reason:
            self.session.refuse("correctness", reason, self.problem, one.entry, voids=True)
        return not reason

    def _record(self, ready: Sequence[Ready], clock: Clock) -> None:
        """A row for each of ours and each peer, of the same rounds, and the control's."""
        gpu, ours = self.world.bench.gpu, [one for one in ready if one.implementation.origin == "ours" and not one.is_control]
        reads = self.problem.min_bytes() // self.problem.gpus()
        cache: Cache = "cold" if gpu is None or reads > 2 * gpu.l2_bytes else "warm"
        pairs = [
            (own, one)
            for own in ours
            for one in ready
            if one.implementation.origin == "peer" or (one.is_control and one.implementation == own.implementation)
        ]
        for own, rival in pairs:
            how = {"clock": clock, "cache": cache, "calls": own.calls, "input_sets": 1, **self._conditions}
            how |= {"device_seconds": round(self._seconds / len(pairs), 4)}
            samples = {"a": own.slowest, "b": rival.slowest, "a_by_rank": own.by_rank, "b_by_rank": rival.by_rank}
            self.session.timed(self.problem, own.entry, rival.entry, **samples, **how)


def _joined(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The conditions of all ranks: what discredits one GPU's samples discredits all."""
    hottest = max((one["temperature_c"] for one in every if one["temperature_c"] is not None), default=None)
    return {
        **every[0],
        "temperature_c": hottest,
        "throttle": sorted({word for one in every for word in one["throttle"]}),
        "power_capped": any(one["power_capped"] for one in every),
    }
