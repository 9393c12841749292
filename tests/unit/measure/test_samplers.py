"""Samplers behind a channel: what is no time, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.measure.samplers import RemoteSampler, random_scale

CALLS = 100


class Claiming:
    """A worker whose samples claim this time of a call."""

    folder, alive, last_wall_ns = Path(), True, 7

    def __init__(self, claim: Any) -> None:
        self.claim = claim

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        return {"ns": self.claim}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("claim", ["soon", None, float("nan"), float("inf")])
def test_what_is_no_time_counts_as_none(claim: Any) -> None:
    assert RemoteSampler(Claiming(claim), "eager", 0, CALLS).sample() == 0.0


def test_no_scale_comes_twice_before_all_have_come() -> None:
    scales = [random_scale() for _ in range(129)]
    assert min(scales) >= 0.5
    assert max(scales) <= 1.5
    assert all((scale * 128).is_integer() for scale in scales)
    assert len(set(scales)) >= 65  # however many the tests before this one drew
