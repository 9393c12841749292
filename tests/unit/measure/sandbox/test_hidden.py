"""Work where no clock runs, with processes of the test: what reading answers, or changing values, takes in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.measure.samplers import RemoteSampler
from flashmoe_science.measure.sandbox.checks import done_ahead, put_off

RIVAL_NS, SETS, KEPT = 100_000.0, 50, 16
READ_NS, CHANGE_NS = 400_000, 2_000_000


class Taking:
    """Takes ``more`` nanoseconds beyond what reading answers, or changing values, takes by itself; and at times the machine
    holds it up besides."""

    folder = Path()

    def __init__(self, more: float = 0.0) -> None:
        self.more, self.asked, self.last_wall_ns = more, 0, 0

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.asked += 1
        held_up = 5_000_000 if self.asked % 3 == 0 else 0
        self.last_wall_ns = round({"show": READ_NS, "refresh": CHANGE_NS}.get(do, 0) + self.more + held_up)
        return {"ns": 1.0, "set": 0, "plain": True, "count": 1, "kept": KEPT}


def remote(more: float = 0.0) -> RemoteSampler:
    return RemoteSampler(Taking(more), "eager", 0, 100)


def test_an_answer_that_is_made_when_it_is_read_is_named() -> None:
    reason = put_off(remote(KEPT * RIVAL_NS), remote(), RIVAL_NS / 10, RIVAL_NS)
    assert reason == ("it puts work off until somebody looks: reading 16 of its answers takes 2.00 ms, of its rival's 0.40 ms")


def test_work_while_values_are_changed_is_named() -> None:
    reason = done_ahead(Taking(SETS * RIVAL_NS), Taking(), RIVAL_NS / 10, RIVAL_NS, SETS)
    assert reason == ("it works while no clock runs: new values in its 50 input sets take 7.00 ms, without it 2.00 ms")


@pytest.mark.parametrize(("more", "own_ns"), [(0.0, RIVAL_NS / 10), (RIVAL_NS, RIVAL_NS / 10), (KEPT * RIVAL_NS, RIVAL_NS)])
def test_who_is_honestly_faster_or_no_faster_is_not_suspected(more: float, own_ns: float) -> None:
    assert put_off(remote(more), remote(), own_ns, RIVAL_NS) is None
    assert done_ahead(Taking(more), Taking(), own_ns, RIVAL_NS, SETS) is None
