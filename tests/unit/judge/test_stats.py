"""Intervals are held to what they say: simulated timings of a known ratio, in the ways that real ones misbehave."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from flashmoe_science.judge.stats import (
    Interval,
    call,
    geometric_mean,
    quotient,
    ratio_interval,
    time_interval,
)

Floats = NDArray[np.float64]
Maker = Callable[[np.random.Generator, float], tuple[list[int], list[int]]]
TIME = 100_000.0


def autoregressive(rng: np.random.Generator, count: int, rho: float) -> Floats:
    noise = rng.standard_normal(count + 50)
    series = np.zeros(count + 50)
    for index in range(1, len(series)):
        series[index] = rho * series[index - 1] + noise[index]
    return series[50:] * math.sqrt(1 - rho**2)


def integers(a: Floats, b: Floats) -> tuple[list[int], list[int]]:
    return [round(x) for x in a], [round(x) for x in b]


def independent(rng: np.random.Generator, ratio: float, count: int = 40) -> tuple[list[int], list[int]]:
    return integers(TIME * np.exp(0.01 * rng.standard_normal(count)), ratio * TIME * np.exp(0.01 * rng.standard_normal(count)))


def few(rng: np.random.Generator, ratio: float) -> tuple[list[int], list[int]]:
    return independent(rng, ratio, 12)


def correlated(rng: np.random.Generator, ratio: float) -> tuple[list[int], list[int]]:
    b = ratio * TIME * np.exp(0.01 * autoregressive(rng, 40, 0.5))
    return integers(TIME * np.exp(0.002 * rng.standard_normal(40)), b)


def strongly_correlated(rng: np.random.Generator, ratio: float) -> tuple[list[int], list[int]]:
    b = ratio * TIME * np.exp(0.01 * autoregressive(rng, 40, 0.7))
    return integers(np.full(40, TIME), b)


def drifting(rng: np.random.Generator, ratio: float) -> tuple[list[int], list[int]]:
    """The clock slows by 20% over the run; taken A B B A, so the drift within a pair changes sign from pair to pair."""
    a, b = np.empty(40), np.empty(40)
    for pair in range(40):
        first, second = (1 + 0.2 * moment / 80 for moment in (2 * pair, 2 * pair + 1))
        if pair % 2:
            first, second = second, first
        a[pair] = TIME * first * math.exp(0.01 * rng.standard_normal())
        b[pair] = ratio * TIME * second * math.exp(0.01 * rng.standard_normal())
    return integers(a, b)


def heavy_tailed(rng: np.random.Generator, ratio: float) -> tuple[list[int], list[int]]:
    noise = [np.exp(0.01 * rng.standard_normal(40) + 0.3 * (rng.random(40) < 0.08)) for _ in range(2)]
    return integers(TIME * noise[0], ratio * TIME * noise[1])


def quantised(rng: np.random.Generator, ratio: float) -> tuple[list[int], list[int]]:
    """A clock that ticks every 500 ns under a time of some 10 us, with noise far below the tick."""
    base = 10_000 * math.exp(0.1 * rng.standard_normal())
    times = [base * np.exp(0.002 * rng.standard_normal(40)), ratio * base * np.exp(0.002 * rng.standard_normal(40))]
    return integers(*(np.round(series / 500) * 500 for series in times))


@pytest.mark.parametrize("make", [independent, few, correlated, drifting, heavy_tailed], ids=lambda make: make.__name__)
def test_the_interval_covers_the_truth(make: Maker) -> None:
    rng = np.random.default_rng(7)
    ratios = np.exp(rng.uniform(-1, 1, 400))
    covered = sum(
        interval.low <= ratio <= interval.high for ratio in ratios for interval in [ratio_interval(*make(rng, ratio))]
    )
    assert covered / len(ratios) >= 0.92


def test_strong_autocorrelation_is_covered_nine_times_in_ten() -> None:
    rng = np.random.default_rng(8)
    covered = sum(x.low <= 1.3 <= x.high for x in (ratio_interval(*strongly_correlated(rng, 1.3)) for _ in range(400)))
    assert covered / 400 >= 0.90  # 40 pairs that follow each other so closely hold the information of seven


def test_a_coarse_clock_does_not_collapse_the_interval() -> None:
    rng = np.random.default_rng(9)
    ratios = np.exp(rng.uniform(-0.2, 0.2, 300))
    intervals = [ratio_interval(*quantised(rng, ratio), resolution=500) for ratio in ratios]
    assert sum(x.low <= ratio <= x.high for x, ratio in zip(intervals, ratios, strict=True)) / 300 >= 0.95


def test_identical_readings_are_bounded_by_the_tick() -> None:
    interval = ratio_interval([10_000] * 40, [10_000] * 40, resolution=500)
    assert interval.ratio == 1
    assert interval.low == pytest.approx(1 / 1.025**2)
    assert interval.high == pytest.approx(1.025**2)
    assert call(interval) == "undecided"  # a 5% tick cannot show that two times are within 2%


def test_a_grid_that_shows_in_the_readings_is_believed() -> None:
    a = [10_000, 10_500] * 20
    assert ratio_interval(a, a, resolution=1).bound == pytest.approx(2 * math.log1p(250 / 10_250))
    spread = list(range(10_000, 10_040))
    assert ratio_interval(spread, spread, resolution=1).bound == pytest.approx(2 * math.log1p(0.5 / 10_019.5))


@pytest.mark.parametrize("make", [independent, correlated, drifting], ids=lambda make: make.__name__)
def test_a_kernel_against_itself_is_seldom_called_different(make: Maker) -> None:
    rng = np.random.default_rng(10)
    calls = [call(ratio_interval(*make(rng, 1.0))) for _ in range(400)]
    assert sum(verdict in ("faster", "slower") for verdict in calls) / 400 < 0.05
    assert calls.count("equivalent") > 200


@pytest.mark.parametrize("ratio", [0.5, 0.95, 1.05, 2.0])
def test_a_real_difference_is_found_with_the_right_sign(ratio: float) -> None:
    rng = np.random.default_rng(11)
    calls = [call(ratio_interval(*independent(rng, ratio))) for _ in range(50)]
    assert calls.count("faster" if ratio > 1 else "slower") == 50


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.99, 1.01, "equivalent"),
        (1.005, 1.015, "equivalent"),  # a difference, of no consequence
        (1.01, 1.05, "faster"),
        (1.03, 1.05, "faster"),
        (0.95, 0.99, "slower"),
        (0.97, 1.01, "undecided"),
        (0.5, 2.0, "undecided"),
    ],
)
def test_calls(low: float, high: float, said: str) -> None:
    assert call(Interval(math.sqrt(low * high), low, high, 40)) == said


@pytest.mark.parametrize(("ratio", "low", "high"), [(1.1, 1.04, 1.17), (1 / 1.1, 1 / 1.17, 1 / 1.04)])
def test_one_of_many_needs_more_to_be_at_odds_with_one(ratio: float, low: float, high: float) -> None:
    interval = Interval(ratio, low, high, 40)
    assert interval.at_odds_with_one(1)
    assert not interval.at_odds_with_one(1000)
    assert Interval(ratio, ratio * 0.99, ratio * 1.01, 40).at_odds_with_one(1000)
    assert not Interval(1.0, 0.9, 1.1, 40).at_odds_with_one(1)


def test_the_same_samples_give_the_same_interval_and_others_do_not() -> None:
    rng = np.random.default_rng(12)
    a, b = independent(rng, 1.1)
    assert ratio_interval(a, b) == ratio_interval(a, b)
    assert ratio_interval(a, b) != ratio_interval(b, a)


def test_the_other_side_sees_the_inverse() -> None:
    interval = ratio_interval(*independent(np.random.default_rng(13), 1.5))
    flipped = interval.flipped()
    assert flipped.ratio == pytest.approx(1 / 1.5, rel=0.02)
    assert flipped.low < flipped.ratio < flipped.high
    assert (flipped.flipped().low, flipped.flipped().high) == pytest.approx((interval.low, interval.high))


def test_rows_average_geometrically_and_resample_apart() -> None:
    rng = np.random.default_rng(14)
    rows = [ratio_interval(*independent(rng, ratio)) for ratio in [0.5, 2.0] * 18]
    mean = geometric_mean(rows)
    assert mean.ratio == pytest.approx(1, rel=0.01)  # the arithmetic mean of these ratios is 1.25
    assert mean.half_width == pytest.approx(np.mean([row.half_width for row in rows]) / 6, rel=0.25)
    assert geometric_mean(rows[:1]).low == pytest.approx(rows[0].low)


def test_the_mean_of_rows_covers_the_truth() -> None:
    rng = np.random.default_rng(15)
    means = [geometric_mean([ratio_interval(*independent(rng, 1.2)) for _ in range(5)]) for _ in range(150)]
    assert sum(mean.low <= 1.2 <= mean.high for mean in means) / 150 >= 0.92


def test_what_is_detectable_is_detected_four_times_in_five() -> None:
    rng = np.random.default_rng(16)
    effect = float(np.median([ratio_interval(*independent(rng, 1.0)).detectable for _ in range(60)]))
    found = sum(ratio_interval(*independent(rng, 1 + effect)).low > 1 for _ in range(300)) / 300
    assert 0.7 <= found <= 0.95


def test_a_ratio_of_ratios_cancels_what_both_share() -> None:
    """Two days, the second 40% slower: our kernel is 1.25 times as fast on it, which its ratio to the same rival shows."""
    rng = np.random.default_rng(20)
    covered = 0
    for _ in range(150):
        first, second = ratio_interval(*independent(rng, 1.2)), ratio_interval(*independent(rng, 1.5))
        between = quotient(second, first)
        covered += between.low <= 1.25 <= between.high
        assert between.bound == first.bound + second.bound
    assert covered / 150 >= 0.92


def test_a_time_has_an_interval_no_narrower_than_the_tick() -> None:
    one = time_interval([10_000] * 20, resolution=500)
    assert (one.ratio, one.low, one.high) == pytest.approx((10_000, 10_000 / 1.025, 10_000 * 1.025))
    noisy = time_interval(independent(np.random.default_rng(21), 1.0)[0])
    assert noisy.low < noisy.ratio < noisy.high
    assert noisy.ratio == pytest.approx(TIME, rel=0.01)


@pytest.mark.parametrize(("times", "said"), [([7], "there are 1 samples"), ([0, 7], "the least time is 0 ns")])
def test_what_is_no_series_of_times_is_refused(times: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        time_interval(times)


def test_outliers_are_counted_and_do_not_decide() -> None:
    a, b = independent(np.random.default_rng(17), 1.2)
    clean = ratio_interval(a, b)
    wild = ratio_interval(a, [*b[:-2], b[-2] * 50, b[-1] * 50])
    assert wild.outliers >= clean.outliers + 2
    assert wild.ratio == pytest.approx(clean.ratio, rel=0.01)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [([1, 2], [1], "a holds 2 samples and b 1"), ([1], [1], "there are 1 pairs"), ([0, 1], [1, 1], "the least time is 0 ns")],
)
def test_what_is_no_pair_of_timings_is_refused(a: list[int], b: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ratio_interval(a, b)


def test_no_rows_have_no_mean() -> None:
    with pytest.raises(ValueError, match="at least one"):
        geometric_mean([])
