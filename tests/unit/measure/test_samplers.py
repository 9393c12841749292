"""Samplers behind a channel: what is no time, and how pairs are ordered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.measure.clocks import Sampling
from flashmoe_science.measure.samplers import RemoteSampler, random_scale, sampled_in_pairs

CALLS = 100


class Claiming:
    """A worker whose samples claim this time of a call."""

    folder, alive, last_wall_ns = Path(), True, 7

    def __init__(self, claim: Any) -> None:
        self.claim, self.asked = claim, list[str]()

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.asked.append(do)
        return {"ns": self.claim}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("claim", ["soon", None, float("nan"), float("inf")])
def test_what_is_no_time_counts_as_none(claim: Any) -> None:
    assert RemoteSampler(Claiming(claim), "eager", 0, CALLS).sample() == 0.0


def test_a_sampler_keeps_what_was_claimed_and_what_passed_and_begins_anew() -> None:
    sampler = RemoteSampler(Claiming(5.0), "eager", 0, CALLS)
    assert sampler.sample() == 5.0
    assert (sampler.claimed, sampler.walls) == ([500.0], [7])
    again = sampler.again()
    assert (again.claimed, again.walls, again.slot, again.calls) == ([], [], 0, CALLS)


def test_something_is_done_ahead_of_every_pair() -> None:
    a, b = Claiming(5.0), Claiming(6.0)
    told: list[tuple[int, int]] = []
    samplers = [RemoteSampler(one, "eager", 0, CALLS) for one in (a, b)]
    own, other = sampled_in_pairs(
        *samplers, Sampling(3, 3, 1.0), lambda index: told.append((index, len(a.asked) + len(b.asked)))
    )
    assert (own, other) == ([5] * 3, [6] * 3)
    assert told == [(0, 0), (1, 2), (2, 4)]


def test_no_scale_comes_twice_before_all_have_come() -> None:
    scales = [random_scale() for _ in range(129)]
    assert min(scales) >= 0.5
    assert max(scales) <= 1.5
    assert all((scale * 128).is_integer() for scale in scales)
    assert len(set(scales)) >= 65  # however many the tests before this one drew
