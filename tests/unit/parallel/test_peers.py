"""No part of a rank's buffer is written while it is read: what stands between two barriers may happen in any order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_science.ops.moe.call import Rows
from flashmoe_science.parallel import peers
from flashmoe_science.parallel.transport import Sizes
from flashmoe_science.parallel.workspace import ExpertWorkspace

BARRIER = "barrier"
SIZES = Sizes(2, 4, 1, 1, torch.float32)
ROWS, X, ROUTING = Rows(None, None, None), torch.zeros(2, 4), torch.zeros(2, 1)


class Recorded(peers.Peers):
    """A rank of two, that notes what it writes into the others' buffers and reads in its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        own: Any = SimpleNamespace(clone=lambda: self.events.append("read tokens"))
        self._sizes, self._ranks, self._rank, self._last = SIZES, 2, 0, ""
        self._addresses, self._everyones, self._results = [X] * 4, [own] * 3, torch.zeros(64, dtype=torch.uint8)
        self._memory: Any = SimpleNamespace(barrier=lambda: self.events.append(BARRIER))
        for name, event in (("dispatch", "write tokens"), ("send", "write results"), ("push", "write results")):
            monkeypatch.setattr(peers, name, lambda *given, event=event: self.events.append(event))
        monkeypatch.setattr(peers, "sum_received", lambda *given: self.events.append("read results"))

    def inference(self, reduced: bool = False, fails: bool = False) -> None:
        self.dispatch(X, ROUTING, ROUTING, kept=False)
        self.events.append("read tokens")
        if not fails:
            self.sent(ROWS, ROUTING if reduced else None, ROUTING, ROUTING)

    def training(self, backward: bool = True, of_tokens: int = 2) -> None:
        self.dispatch(X, ROUTING, ROUTING, kept=True)
        self.results()
        if backward:
            self.gather(X)
            for _ in range(of_tokens):  # gradients of hidden states and of routing weights
                self.results()

    def results(self) -> None:
        self.exchange(X)
        self.events.append("read results")


def faults(events: list[str]) -> list[str]:
    """Parts that are read where they may be written, or before they have been. All ranks do the same."""
    found, written = [], set[str]()
    between = [part.split(",") for part in ",".join(events).split(BARRIER)]
    for steps in between:
        reads, writes = ({one.split()[1] for one in steps if one.startswith(word)} for word in ("read", "write"))
        found += [f"{part} are read while they are written" for part in reads & writes]
        found += [f"{part} are read before they are written" for part in reads - written]
        written |= writes
    return found


@pytest.mark.parametrize(
    "calls",
    [
        [("inference", {}), ("inference", {"reduced": True}), ("inference", {})],
        [("training", {}), ("training", {"of_tokens": 0}), ("training", {"of_tokens": 1}), ("inference", {})],
        [("training", {"backward": False}), ("training", {"of_tokens": 0}), ("training", {})],
        [("inference", {"fails": True}), ("inference", {}), ("inference", {"fails": True}), ("training", {})],
    ],
)
def test_parts_are_read_behind_a_barrier(calls: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Recorded(monkeypatch)
    for name, options in calls:
        getattr(rank, name)(**options)
    assert faults(rank.events) == []


def test_a_call_has_two_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Recorded(monkeypatch)
    rank.inference()
    rank.inference()
    assert rank.events.count(BARRIER) == 4


@pytest.mark.parametrize("options", [None, {"of_tokens": 0}])
def test_a_barrier_that_is_missing_is_noticed(options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Recorded(monkeypatch)
    for _ in range(2):
        rank.inference() if options is None else rank.training(**options)
    barriers = [place for place, event in enumerate(rank.events) if event == BARRIER]
    for place in barriers[: None if options is None else -1]:
        assert faults(rank.events[:place] + rank.events[place + 1 :]), f"without event {place} of {rank.events}"


@pytest.mark.parametrize(("tokens", "measured"), [(16, 20e-6), (64, 22e-6), (4096, 130e-6)])
def test_the_time_of_reduced_exchanges_is_predicted_as_measured(tokens: int, measured: float) -> None:
    """Qwen3-30B on two H200 (docs/notes/two-gpus.md)."""
    sizes = {"ranks": 2, "max_tokens": tokens, "hidden": 2048, "top_k": 8, "dtype": torch.bfloat16}
    workspace: Any = SimpleNamespace(transport=peers.Peers, **sizes)
    assert ExpertWorkspace.cost(workspace, "reduced").seconds == pytest.approx(measured, rel=0.15)
