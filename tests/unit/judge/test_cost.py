"""What runs took is added up from their records, and priced only where a price is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from flashmoe_science.judge.report.page import cost_line
from flashmoe_science.store import Run

Maker = Callable[..., Any]


@pytest.fixture
def run(fabricate: Maker) -> Run:
    """600 s on the wall; three pairs of half a second, in which fa3 takes three times as long as ours."""
    made = fabricate().control().timed("fwd_triton", 20_000, "fa3", 60_000, noise=0)
    return made.timed("fwd_triton", 20_000, "fa3", 60_000, noise=0, clock="eager").done()  # type: ignore[no-any-return]


def priced(run: Run, price: float) -> Run:
    return dataclasses.replace(run, header=run.header.model_copy(update={"price_per_hour": price}))


def test_a_run_costs_its_time_on_the_wall_at_the_price_that_it_recorded(run: Run) -> None:
    assert cost_line([priced(run, 7.2)]) == "1 run, 10 min 00 s, of which 1.5 s timed: $1.20"


def test_all_runs_are_one_line(run: Run, fabricate: Maker) -> None:
    other = fabricate("r2").control("sdpa").done()
    assert (
        cost_line([priced(run, 3.6), other]) == "2 runs, 20 min 00 s, of which 2.0 s timed: $0.60 for the 1 that have a price"
    )
    assert cost_line([]) == "nothing was run"
    assert cost_line([other]) == "1 run, 10 min 00 s, of which 0.5 s timed; no price is known"
