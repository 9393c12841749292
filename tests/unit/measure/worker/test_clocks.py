"""Samples where a kernel lives: a graph, which the test replays, writes where it was captured; a cut sample shows its call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_science.contract import built_in
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.clocks import Sampler
from flashmoe_science.measure.inputs import Memory
from flashmoe_science.measure.worker.callers import FunctionCaller
from flashmoe_science.measure.worker.clocks import Clocks, Slot, Tap
from flashmoe_science.operations import parse_problem

PROBLEM = parse_problem("attn b1 h1 q4 d4 fp32")
SET = 7


def worker(caller: FunctionCaller, handover: Memory, trusted: bool) -> Any:
    bench = Bench(torch.device("cpu"), None)
    return SimpleNamespace(bench=bench, handover=handover, caller=lambda who, config: caller, trusted=trusted)


@pytest.mark.parametrize("works", [True, False])
def test_a_replay_is_looked_at_after_samples_that_were_timed(works: bool) -> None:
    """What it does not write anew is seen: it was filled with NaN before."""
    contract = built_in("attention")
    written = torch.ones(1, 1, 4, 4)
    replays: list[float] = []

    def replay() -> float:
        replays.append(1000.0)
        if works:
            written.fill_(float(len(replays)))
        return 1000.0

    caller, handover = FunctionCaller(contract, PROBLEM, torch.clone), Memory()
    clocks = Clocks(worker(caller, handover, False), contract, PROBLEM)
    tap = Tap(kept=[(SET, written)])
    clocks._slots.append(Slot(caller, "graph", Sampler("graph", 1, replay), (), tap))
    for _ in range(2):
        assert clocks.sample(0) == {"ns": 1000.0}
    assert clocks.sample(0, cut_at=0.5, path="out") == {"set": SET, "plain": True, "count": 1}
    (seen,), _ = handover.get("out", [((1, 1, 4, 4), torch.float32)], torch.device("cpu"))
    assert bool((seen == 3.0).all() if works else seen.isnan().all())
