"""Intervals are held to what they say, on simulated timings of a known ratio."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from tests.unit.judge.timings import TIME, Samples, correlated, drifting, few, heavy_tailed, independent, quantised

from flashmoe_science.judge.stats import Interval, call, geometric_mean, ratio_interval, time_interval


def strongly_correlated(rng: np.random.Generator, ratio: float) -> Samples:
    return correlated(rng, ratio, rho=0.7)


@pytest.mark.parametrize(
    ("make", "least"),
    [
        (independent, 0.92), (few, 0.92), (correlated, 0.92), (drifting, 0.92), (heavy_tailed, 0.92),
        (strongly_correlated, 0.90),  # 40 pairs that follow each other so closely hold the information of seven
        (quantised, 0.95),  # a coarse clock does not collapse it
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_the_interval_covers_the_truth(make: Callable[..., Samples], least: float) -> None:
    rng = np.random.default_rng(7)
    ratios = np.exp(rng.uniform(-0.2, 0.2, 300))
    found = [ratio_interval(*make(rng, ratio), 500.0 if make is quantised else 1.0) for ratio in ratios]
    assert sum(one.low <= ratio <= one.high for one, ratio in zip(found, ratios, strict=True)) / 300 >= least


def test_readings_on_a_grid_are_bounded_by_its_tick() -> None:
    interval = ratio_interval([10_000] * 40, [10_000] * 40, resolution=500)
    assert (interval.ratio, interval.low, interval.high) == pytest.approx((1, 1 / 1.025**2, 1.025**2))
    assert call(interval) == "undecided"  # a 5% tick cannot show that two times are within 2%
    a, spread = [10_000, 10_500] * 20, list(range(10_000, 10_040))
    assert ratio_interval(a, a, resolution=1).bound == pytest.approx(2 * math.log1p(250 / 10_250))  # the grid that shows
    assert ratio_interval(spread, spread, resolution=1).bound == pytest.approx(2 * math.log1p(0.5 / 10_019.5))
    one = time_interval([10_000] * 20, resolution=500)
    assert (one.ratio, one.low, one.high) == pytest.approx((10_000, 10_000 / 1.025, 10_000 * 1.025))


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.99, 1.01, "equivalent"),
        (1.005, 1.015, "equivalent"),  # a difference, of no consequence
        (1.01, 1.05, "faster"),
        (0.95, 0.99, "slower"),
        (0.97, 1.01, "undecided"),
    ],
)
def test_calls(low: float, high: float, said: str) -> None:
    assert call(Interval(math.sqrt(low * high), low, high, 40)) == said


def test_the_same_samples_give_the_same_interval_and_the_other_side_sees_its_inverse() -> None:
    a, b = independent(np.random.default_rng(12), 1.5)
    interval = ratio_interval(a, b)
    assert interval == ratio_interval(a, b) != ratio_interval(b, a)
    flipped = interval.flipped()
    assert flipped.low < flipped.ratio < flipped.high
    assert flipped.ratio == pytest.approx(1 / 1.5, rel=0.02)
    assert (flipped.flipped().low, flipped.flipped().high) == pytest.approx((interval.low, interval.high))


def test_rows_average_geometrically_and_resample_apart() -> None:
    rng = np.random.default_rng(14)
    rows = [ratio_interval(*independent(rng, ratio)) for ratio in [0.5, 2.0] * 18]
    mean = geometric_mean(rows)
    assert mean.ratio == pytest.approx(1, rel=0.01)  # the arithmetic mean of these ratios is 1.25
    assert mean.half_width == pytest.approx(np.mean([row.half_width for row in rows]) / 6, rel=0.25)
    means = [geometric_mean([ratio_interval(*independent(rng, 1.2)) for _ in range(5)]) for _ in range(100)]
    assert sum(one.low <= 1.2 <= one.high for one in means) / 100 >= 0.92


def test_what_is_detectable_is_detected_four_times_in_five() -> None:
    rng = np.random.default_rng(16)
    effect = float(np.median([ratio_interval(*independent(rng, 1.0)).detectable for _ in range(60)]))
    found = sum(ratio_interval(*independent(rng, 1 + effect)).low > 1 for _ in range(200)) / 200
    assert 0.7 <= found <= 0.95


def test_outliers_are_counted_and_do_not_decide() -> None:
    a, b = independent(np.random.default_rng(17), 1.2)
    clean, wild = ratio_interval(a, b), ratio_interval(a, [*b[:-2], b[-2] * 50, b[-1] * 50])
    assert wild.outliers >= clean.outliers + 2
    assert wild.ratio == pytest.approx(clean.ratio, rel=0.01)
    assert time_interval(a).ratio == pytest.approx(TIME, rel=0.01)


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: ratio_interval([1, 2], [1]), "a holds 2 samples and b 1"),
        (lambda: ratio_interval([1], [1]), "there are 1 pairs"),
        (lambda: ratio_interval([0, 1], [1, 1]), "the least time is 0 ns"),
        (lambda: time_interval([7]), "there are 1 samples"),
        (lambda: time_interval([0, 7]), "the least time is 0 ns"),
        (lambda: geometric_mean([]), "at least one"),
    ],
)
def test_what_is_no_timing_is_refused(refused: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refused()
