"""Many rows judged together err together less than one time in twenty, however their timings misbehave."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.fabricated import Fabricate, verdicts
from tests.unit.judge.timings import Samples, correlated, drifting, few, quantised

from flashmoe_science.judge.multiple_testing import holm, named
from flashmoe_science.judge.stats import Interval, call, ratio_interval
from flashmoe_science.judge.summary import groups

ROWS, POOL, SUITES = 36, 1000, 4000


def interval(ratio: float, half: float = 0.02) -> Interval:
    return Interval(ratio, ratio * math.exp(-half), ratio * math.exp(half), 40)


def test_holm_steps_down_and_rows_are_named_by_direction() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert holm([0.012, 0.0125, 0.025, 0.05]) == [True] * 4  # each step has fewer left to correct for
    assert (holm([0.013] * 4), holm([])) == ([False] * 4, [])
    rows = [interval(1.5), interval(0.8), interval(1.021), interval(1.0)]
    assert rows[2].low > 1  # by itself it is faster; as one of four it is not
    assert named(rows) == ([0], [1])
    assert named(rows[2:3]) == ([0], [])
    assert named(rows, ratio=1.2)[1] == [1, 2, 3]


def test_a_p_value_agrees_with_the_interval() -> None:
    one = Interval(1.2, 1.1, 1.3, 40, bound=0.01)
    assert (one.p_above(1.1), one.p_below(1.3)) == pytest.approx((0.025, 0.025))
    assert one.p_above(1.2) > 0.5  # the clock's bound is against it
    assert one.p_above(1.0) < one.p_above(1.05) < one.p_above(1.15)
    assert (one.among(1).low, one.among(1).high) == pytest.approx((1.1, 1.3))
    never_varies = ratio_interval([10_000] * 20, [11_000] * 20, resolution=500)
    assert (never_varies.p_above(1.0), never_varies.p_above(1.06)) == (0.0, 1.0)


def test_a_summary_says_what_is_left_when_its_rows_are_corrected_for_their_number() -> None:
    """Thirty rows that are faster beyond doubt, and five that are so at 95%, each by itself."""
    run = Fabricate()
    for size in range(1, 36):
        problem = f"attn b1 h1 q{size} d64 fp16"
        run.control(problem=problem, noise=0.0).timed("fwd_triton", 20_000, "fa3", 30_000, problem=problem)
    rows = [row for row in verdicts([run.done()]) if row.origin == "ours"]
    for place in range(5):
        doubtful = Interval(1.03, 1.001, 1.06, 20, resamples=rows[place].interval.resamples)
        rows[place] = replace(rows[place], ratio=1.03, low=1.001, high=1.06, interval=doubtful)
    (group,) = groups(rows)
    assert (group.counts["faster"], group.sure) == (35, {"faster": 30, "slower": 0})
    assert group.corrected == "corrected for 35 rows (Holm): 30 faster, 0 slower, 5 not told apart"


@pytest.mark.parametrize("make", [few, correlated, drifting, quantised], ids=lambda make: make.__name__)
def test_rows_of_a_suite_err_together_less_than_one_time_in_twenty(make: Callable[..., Samples]) -> None:
    """Family-wise: the share of suites of 36 equal rows of which any is named faster or slower, or has an end beyond 1."""
    rng = np.random.default_rng(21)
    pool = [ratio_interval(*make(rng), 500.0 if make is quantised else 1.0) for _ in range(POOL)]
    suites = rng.integers(0, POOL, (SUITES, ROWS))
    smallest = np.array([min(one.p_above(1.0), one.p_below(1.0)) for one in pool])[suites].min(axis=1)
    assert np.mean(smallest <= 0.05 / (2 * ROWS)) < 0.05  # where Holm names a row
    assert np.mean(smallest <= 0.025) > 0.3 or make is quantised  # which is why it is corrected
    missed = np.array([not one.low <= 1 <= one.high for one in (each.among(ROWS) for each in pool)])
    assert np.mean(missed[suites].any(axis=1)) < 0.05
    if make in (correlated, drifting):
        calls = [call(one) for one in pool]
        assert sum(verdict in ("faster", "slower") for verdict in calls) / POOL < 0.05
        assert calls.count("equivalent") > POOL / 2
