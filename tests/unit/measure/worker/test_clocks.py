"""Samples of a graph, which is played here: its outputs lie where they were captured, from replay to replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashmoe_science.contract import built_in
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.clocks import Sampler
from flashmoe_science.measure.trial.clockwork import Clockwork, Slot, Tap
from flashmoe_science.measure.trial.players import Function
from flashmoe_science.operations import parse_problem

PROBLEM = parse_problem("attn b1 h1 q4 d4 fp32")
SET = 7


@pytest.mark.parametrize("works", [True, False])
def test_a_replay_is_looked_at_after_samples_that_were_timed(works: bool, tmp_path: Path) -> None:
    """What it does not write anew is seen: it was filled with NaN before."""
    contract, bench = built_in("attention"), Bench(torch.device("cpu"), None)
    written = torch.ones(1, 1, 4, 4)
    replays: list[float] = []

    def replay() -> float:
        replays.append(1000.0)
        if works:
            written.fill_(float(len(replays)))
        return 1000.0

    clockwork = Clockwork(contract, PROBLEM, bench, lambda who, config: Function(contract, PROBLEM, torch.clone))
    tap = Tap(kept=[(SET, written)])
    clockwork._slots.append(Slot(clockwork._player("", ""), "graph", Sampler("graph", 1, replay), tap))
    for _ in range(2):
        assert clockwork.sample(0) == {"ns": 1000.0}
    path = tmp_path / "out"
    assert clockwork.sample(0, cut_at=0.5, path=str(path)) == {"set": SET, "plain": True}
    seen = torch.frombuffer(bytearray(path.read_bytes()[-4 * 16 :]), dtype=torch.float32)
    assert bool((seen == 3.0).all() if works else seen.isnan().all())
