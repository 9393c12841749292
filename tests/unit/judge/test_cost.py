"""What runs took is added up from their records, and priced only where a price was given."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from flashmoe_science.judge.cost import at_price, run_cost, total_cost
from flashmoe_science.measure.price import PRICE_VARIABLE
from flashmoe_science.store import Run

Maker = Callable[..., Any]


@pytest.fixture
def run(fabricate: Maker) -> Run:
    """600 s on the wall; three pairs of half a second, in which fa3 takes three times as long as ours."""
    made = fabricate().control().timed("fwd_triton", 20_000, "fa3", 60_000, noise=0)
    return made.timed("fwd_triton", 20_000, "fa3", 60_000, noise=0, clock="eager").done()  # type: ignore[no-any-return]


def priced(run: Run, price: float) -> Run:
    (one,) = at_price([run], price, every=True)
    return one


def test_a_kernel_costs_its_share_of_the_seconds_in_which_it_was_timed(run: Run) -> None:
    cost = run_cost(run)
    assert (cost.run, cost.gpu, cost.wall_seconds, cost.timed_seconds) == ("r1", "h200", 600.0, 1.5)
    assert cost.kernels == pytest.approx({"fa3": 0.75, "fwd_triton": 0.75})
    assert sum(cost.kernels.values()) == pytest.approx(cost.timed_seconds)


def test_no_price_is_made_up(run: Run) -> None:
    assert (run_cost(run).usd, total_cost([run_cost(run)]).usd) == (None, None)
    assert total_cost([run_cost(run)]).kernels_usd == {}


def test_a_run_costs_its_time_on_the_wall(run: Run) -> None:
    assert run_cost(priced(run, 3.6)).usd == pytest.approx(0.6)


def test_a_price_that_is_given_is_every_runs_and_a_default_only_theirs_that_have_none(run: Run) -> None:
    recorded = priced(run, 7.2)
    assert [run_cost(one).usd for one in at_price([run, recorded], 3.6, every=True)] == pytest.approx([0.6, 0.6])
    assert [run_cost(one).usd for one in at_price([run, recorded], 3.6, every=False)] == pytest.approx([0.6, 1.2])
    assert at_price([run, recorded], None, every=True) == [run, recorded]


def test_a_run_that_was_cut_cost_what_it_timed_at_least(run: Run) -> None:
    cost = run_cost(priced(dataclasses.replace(run, rows=run.rows[:-1]), 3600.0))
    assert (cost.wall_seconds, cost.usd) == (None, pytest.approx(1.5))
    assert total_cost([cost]).cut == 1


def test_samples_that_were_taken_again_were_paid_for_too(run: Run) -> None:
    timings = tuple(row for row in run.rows if row.kind == "timing")
    assert run_cost(dataclasses.replace(run, voided=timings)).timed_seconds == pytest.approx(3.0)


def test_the_total_says_how_many_runs_have_a_price(run: Run, fabricate: Maker) -> None:
    other = fabricate("r2").control("sdpa").done()
    total = total_cost([run_cost(priced(run, 3.6)), run_cost(other)])
    assert (total.runs, total.priced, total.wall_seconds, total.timed_seconds) == (2, 1, 1200.0, 2.0)
    assert total.usd == pytest.approx(0.6)
    assert list(total.kernels) == ["fa3", "fwd_triton", "sdpa"]
    assert "sdpa" not in total.kernels_usd
    assert total.kernels_usd["fa3"] == pytest.approx(0.75 * 3.6 / 3600)


def test_the_command_prices_what_it_prints(
    flashmoe: Callable[..., tuple[int, str, str]], recorded: Maker, fabricate: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PRICE_VARIABLE, raising=False)
    folder = recorded(fabricate().control().timed("fwd_triton", 20_000, "fa3", 60_000))
    code, out, _ = flashmoe("cost", "--evidence", folder, "--price", "3.6", "--json")
    found = json.loads(out)
    assert (code, found["runs"][0]["usd"], found["total"]["usd"]) == (0, pytest.approx(0.6), pytest.approx(0.6))
    code, out, _ = flashmoe("cost", "--evidence", folder)
    assert "1 run, 10 min 00 s, of which 1.00 s timed; no price is known (--price USD_PER_HOUR)" in out
    code, _, err = flashmoe("cost", "--evidence", folder, "--price", "-1")
    assert (code, err) == (2, "flashmoe: --price is -1.0; it must be USD an hour, from 0 to 1,000,000\n")
