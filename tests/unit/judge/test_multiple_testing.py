"""Many rows judged together err together less than one time in twenty, however their timings misbehave."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashmoe_science.judge.multiple_testing import holm, least, most, named
from flashmoe_science.judge.standing import verdicts
from flashmoe_science.judge.stats import Interval, ratio_interval
from flashmoe_science.judge.summary import groups

Floats = NDArray[np.float64]
ROWS, PAIRS, POOL, SUITES = 36, 40, 2000, 4000
TIME = 100_000.0


def noise(rng: np.random.Generator) -> Floats:
    """[2, PAIRS] of independent noise, 1%."""
    return 0.01 * rng.standard_normal((2, PAIRS))


def independent(rng: np.random.Generator) -> Floats:
    return np.round(TIME * np.exp(noise(rng)))


def few(rng: np.random.Generator) -> Floats:
    """As few pairs as the adaptive stop ever leaves."""
    return independent(rng)[:, :12]


def correlated(rng: np.random.Generator) -> Floats:
    """The rival's times follow each other (0.5 from one to the next)."""
    steps = rng.standard_normal(PAIRS + 50)
    for index in range(1, len(steps)):
        steps[index] += 0.5 * steps[index - 1]
    return np.round(TIME * np.exp([0.2 * noise(rng)[0], 0.01 * math.sqrt(0.75) * steps[50:]]))


def drifting(rng: np.random.Generator) -> Floats:
    """The clock slows by 20% over the run; taken A B B A, so that the drift within a pair changes sign."""
    moments = 1 + 0.2 * np.arange(2 * PAIRS).reshape(PAIRS, 2) / (2 * PAIRS)
    moments[1::2] = moments[1::2, ::-1]
    return np.round(TIME * moments.T * np.exp(noise(rng)))


def quantised(rng: np.random.Generator) -> Floats:
    """A clock that ticks every 500 ns under some 10 us."""
    base = 10_000 * math.exp(0.1 * rng.standard_normal())
    return np.round(base * np.exp(0.2 * noise(rng)) / 500) * 500


MAKERS: list[Callable[[np.random.Generator], Floats]] = [independent, few, correlated, drifting, quantised]


@pytest.fixture(scope="module", params=MAKERS, ids=lambda make: make.__name__)
def against_itself(request: pytest.FixtureRequest) -> list[Interval]:
    """Measurements of kernels against themselves, of which suites are drawn."""
    rng = np.random.default_rng(21)
    resolution = 500.0 if request.param is quantised else 1.0
    return [ratio_interval(*request.param(rng).astype(int).tolist(), resolution) for _ in range(POOL)]


def test_suites_of_equals_are_seldom_told_apart(against_itself: list[Interval]) -> None:
    """Family-wise error: the share of suites of 36 equal rows in which any row is named faster or slower."""
    rng = np.random.default_rng(22)
    smallest = np.array([min(one.p_above(1.0), one.p_below(1.0)) for one in against_itself])
    suites = smallest[rng.integers(0, POOL, (SUITES, ROWS))]
    assert np.mean(suites.min(axis=1) <= 0.05 / (2 * ROWS)) < 0.05  # where Holm names a row
    uncorrected = np.mean(suites.min(axis=1) <= 0.025)
    resolved = any(one.bound < 0.01 for one in against_itself)
    assert uncorrected > 0.3 or not resolved  # which is why it is corrected


def test_ends_for_all_rows_at_once_hold_together(against_itself: list[Interval]) -> None:
    rng = np.random.default_rng(23)
    stretched = [one.among(ROWS) for one in against_itself]
    missed = np.array([not one.low <= 1 <= one.high for one in stretched])
    assert np.mean(missed[rng.integers(0, POOL, (SUITES, ROWS))].any(axis=1)) < 0.05


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert holm([0.012, 0.0125, 0.025, 0.05]) == [True] * 4  # each step has fewer left to correct for
    assert holm([0.013, 0.013, 0.013, 0.013]) == [False] * 4
    assert holm([]) == []


def interval(ratio: float, half: float = 0.02) -> Interval:
    return Interval(ratio, ratio * math.exp(-half), ratio * math.exp(half), 40)


def test_rows_are_named_by_direction() -> None:
    rows = [interval(1.5), interval(0.8), interval(1.021), interval(1.0)]
    assert rows[2].low > 1  # by itself it is faster; as one of four it is not
    found = named(rows)
    assert (found.above, found.below, found.rows) == ((0,), (1,), 4)
    assert named(rows[2:3]).above == (0,)
    assert named(rows, ratio=1.2).below == (1, 2, 3)


def test_the_extreme_row_has_one_plain_end_and_one_corrected() -> None:
    rows = [interval(1.1), interval(1.2), interval(1.3)]
    lowest, highest = least(rows), most(rows)
    assert (lowest.ratio, lowest.low) == (1.1, rows[0].low)
    assert lowest.high == rows[0].among(3).high > rows[0].high
    assert (highest.ratio, highest.high) == pytest.approx((1.3, rows[2].high))
    assert highest.low == pytest.approx(rows[2].among(3).low)
    assert highest.low < rows[2].low
    assert least(rows[:1]) == rows[0]


def test_a_p_value_agrees_with_the_interval() -> None:
    one = Interval(1.2, 1.1, 1.3, 40, bound=0.01)
    assert one.p_above(1.1) == pytest.approx(0.025)
    assert one.p_below(1.3) == pytest.approx(0.025)
    assert one.p_above(1.2) > 0.5  # the clock's bound is against it
    assert one.p_above(1.0) < one.p_above(1.05) < one.p_above(1.15)
    assert (one.among(1).low, one.among(1).high) == pytest.approx((1.1, 1.3))


def test_readings_that_never_vary_are_decided_by_the_bound() -> None:
    one = ratio_interval([10_000] * 20, [11_000] * 20, resolution=500)
    assert (one.p_above(1.0), one.p_above(1.06)) == (0.0, 1.0)


def test_a_summary_says_what_is_left_when_its_rows_are_corrected_for_their_number(fabricate: Callable[..., Any]) -> None:
    """Thirty rows that are faster beyond doubt, and five that are so at 95%, each by itself."""
    run = fabricate()
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
