"""Times that another process claims, against a clock of ours that the test plays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.measure.trial import duel
from flashmoe_science.measure.trial.duel import REMEMBERED, SLOWED, Remote, beside_over_alone, disagreement, new_over_met

CALLS = 100
SAMPLE_NS = 5_000_000.0


class Played:
    """A child whose samples take ``wall`` ns here, of which it claims what ``claim`` makes of it."""

    folder = Path()

    def __init__(self, walls: Callable[[int], float], claim: Callable[[float], Any] = lambda wall: wall) -> None:
        self._walls, self._claim = walls, claim
        self.samples = self.refreshed = 0
        self.last_wall_ns = 0

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        if do == "refresh":
            self.refreshed = self.samples
            return {}
        wall = self._walls(self.samples)
        self.samples += 1
        self.last_wall_ns = round(wall + 100_000)
        claimed = self._claim(wall)
        return {"ns": claimed / CALLS if isinstance(claimed, float) else claimed}


def jittered(scale: float = 1.0) -> Callable[[int], float]:
    return lambda index: scale * SAMPLE_NS * (1 + 0.01 * (index * 7 % 5))


def sampled(child: Played, samples: int = 9) -> Remote:
    remote = Remote(child, "eager", 0, CALLS)
    for _ in range(samples):
        remote.sample()
    return remote


def test_an_honest_clock_is_believed() -> None:
    assert disagreement(sampled(Played(jittered())), 100_000) is None


def test_an_honest_clock_on_a_machine_that_holds_up_some_answers_is_believed() -> None:
    held_up = Played(lambda index: SAMPLE_NS, claim=float)
    remote = sampled(held_up)
    for index in (0, 3, 6, 7):
        remote.walls[index] *= 20
    assert disagreement(remote, 100_000) is None


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.3])
def test_a_clock_that_says_otherwise_is_refused(factor: float) -> None:
    reason = disagreement(sampled(Played(jittered(), lambda wall: wall * factor)), 100_000)
    assert str(reason).startswith("its clock disagrees with the harness's")


@pytest.mark.parametrize("claim", ["soon", None, float("nan"), float("inf")])
def test_what_is_no_time_counts_as_none(claim: Any) -> None:
    assert Remote(Played(jittered(), lambda wall: claim), "eager", 0, CALLS).sample() == 0.0


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_a_rival_is_held_to_its_time_without_the_candidate(factor: float) -> None:
    found = beside_over_alone(sampled(Played(jittered(factor))), sampled(Played(jittered())))
    assert found is not None
    assert found.low <= factor <= found.high
    assert (found.low > SLOWED) == (factor > 1)


@pytest.mark.parametrize("factor", [1, 3])
def test_a_candidate_is_held_to_its_time_on_values_that_it_has_met(factor: int) -> None:
    child = Played(lambda index: SAMPLE_NS * (factor if index - child.refreshed < 2 else 1))
    found = new_over_met(Remote(child, "eager", 0, CALLS), sets=2 * CALLS)
    assert found is not None
    assert found.ratio == pytest.approx(factor)
    assert (found.low > REMEMBERED) == (factor > 1)


def test_what_is_no_time_gives_no_ratio() -> None:
    none = Remote(Played(jittered(), lambda wall: None), "eager", 0, CALLS)
    assert (new_over_met(none, sets=CALLS), beside_over_alone(none, sampled(Played(jittered())))) == (None, None)


def test_scales_do_not_come_again_soon_and_give_both_processes_the_same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(duel, "_scales", [])
    scales = [duel.random_scale() for _ in range(100)]
    assert len(set(scales)) == 100
    for scale in scales:
        assert 0.5 <= scale <= 1.5
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            refreshed, made = torch.linspace(-3, 3, 999, dtype=dtype), torch.linspace(-3, 3, 999, dtype=dtype)
            torch._foreach_mul_([refreshed], scale)
            assert torch.equal(refreshed, made.mul_(scale))
