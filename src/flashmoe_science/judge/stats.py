"""Ratios of paired timings, with intervals that hold when samples follow each other and when the clock is coarse.

The estimate is the median over pairs of log(b_i / a_i). The two samples of a pair are taken one after the other, so drift of
the clock changes both alike and cancels in their ratio. Outliers are counted, never dropped; they hardly move a median.

The interval is a circular block bootstrap of that median (Politis and Romano, 1992), with three corrections for runs of 20
to 40 pairs, whose coverage ``tests/unit/judge/test_stats.py`` holds:

1. the block length is Andrews' (1991) plug-in rule for a Bartlett window on a first-order autoregression, at most n/4. The
   autocorrelation is that of the ranks, corrected for small-sample bias (Kendall, 1954) and raised by half a standard error;
2. blocks of finite length see only a part of the variance of an autocorrelated mean: the interval is widened by what a
   first-order autoregression of that autocorrelation loses;
3. the critical value is the fixed-b one (Kiefer and Vogelsang, 2005, table 1, Bartlett, 97.5%) in place of the normal one.

Last, the interval is widened by the clock's resolution: a reading of t on a grid of q shows only that the time is within q/2
of t, however many readings agree. This widening is a bound, so it adds, and does not shrink with more pairs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Call = Literal["faster", "slower", "equivalent", "undecided"]

MARGIN = 0.02  # differences below this are of no consequence to a user, and within run-to-run variation of one GPU
MIN_PAIRS = 6  # the fewest whose range, least to greatest, covers the median 95 times in 100: 1 - 2 / 2**6 is 0.97
RESAMPLES = 2000
_TAIL = 0.025  # outside either end of a 95% interval
_NORMAL = 1.959964  # the normal quantile of 97.5%
_POWER = 2.801585  # the normal quantiles of 97.5% and 80%, added: an effect of so many standard errors is seen 4 times in 5

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio (above 1: the first is faster) with its 95% interval.

    ``resamples`` are bootstrap replicates of log(ratio), already widened, [RESAMPLES] fp64; ``bound`` is the half-width that
    the clock's resolution adds on top, in log units."""

    ratio: float
    low: float
    high: float
    pairs: int
    block: int = 1
    outliers: int = 0
    bound: float = 0.0
    resamples: Floats = field(default_factory=lambda: np.zeros(0), compare=False, repr=False)

    @property
    def ends(self) -> dict[str, float]:
        """The ratio and its interval, as plain values."""
        return {"ratio": self.ratio, "low": self.low, "high": self.high}

    @property
    def half_width(self) -> float:
        """Half the interval's width in log units: 0.01 is about 1%."""
        return math.log(self.high / self.low) / 2

    @property
    def detectable(self) -> float:
        """Smallest relative difference that such a measurement detects four times in five (0.01 is 1%)."""
        return math.expm1(_POWER / _NORMAL * self.half_width)

    def widened(self, by: float) -> Interval:
        """The interval widened at either end by ``by`` (log units), which the harness may be off."""
        return replace(self, low=self.low * math.exp(-by), high=self.high * math.exp(by), bound=self.bound + by)

    def among(self, comparisons: int) -> Interval:
        """The interval as one of ``comparisons``: wide enough that all of them hold at once, 95 times in 100 (Bonferroni).

        Only its chance part is stretched, as Student's t is; the clock's bound holds for each comparison anyway."""
        stretch = _student(_TAIL / comparisons, self.tail_freedom) / _student(_TAIL, self.tail_freedom)
        down, up = (max(math.log(end) - self.bound, 0.0) for end in (self.ratio / self.low, self.high / self.ratio))
        return replace(
            self, low=self.ratio * math.exp(-stretch * down - self.bound), high=self.ratio * math.exp(stretch * up + self.bound)
        )

    def p_above(self, ratio: float) -> float:
        """The one-sided p-value of the hypothesis that the true ratio is ``ratio`` or less, by Student's t; 2.5% where ``low``
        is ``ratio``."""
        chance = math.log(self.ratio / self.low) - self.bound
        distance = math.log(self.ratio / ratio) - self.bound
        if chance <= 1e-12:  # the readings never vary: the interval is the clock's bound alone
            return float(distance < 0)
        return _tail(distance / chance * _student(_TAIL, self.tail_freedom), self.tail_freedom)

    def p_below(self, ratio: float) -> float:
        """The one-sided p-value of the hypothesis that the true ratio is ``ratio`` or more."""
        return self.flipped().p_above(1 / ratio)

    @property
    def freedom(self) -> float:
        """Degrees of freedom: the number of blocks, less one."""
        return max(self.pairs / self.block - 1, 1.0)

    @property
    def tail_freedom(self) -> float:
        """Degrees of freedom of the far tails: a sixth, as a bootstrapped median estimates its own spread worse than a mean,
        by simulation of 12 to 80 pairs, independent and correlated (``tests/unit/judge/test_multiple_testing.py``)."""
        return max(self.freedom / 6, 2.0)

    def excludes_one(self, comparisons: int) -> bool:
        """Whether the interval excludes 1 when corrected for ``comparisons``: Bonferroni at 1% for all together, stretched
        as Student's t with ``freedom``. Far tails bootstrapped from some 20 pairs are too thin: the 1% is near 5% in fact."""
        stretch = _student(0.005 / comparisons, self.freedom) / _student(_TAIL, self.freedom)
        end = self.low if self.ratio > 1 else self.high
        return math.log(self.ratio) * (math.log(self.ratio) + stretch * math.log(end / self.ratio)) > 0

    def flipped(self) -> Interval:
        """The inverse ratio with its interval: the same measurement from the rival's side."""
        return replace(self, ratio=1 / self.ratio, low=1 / self.high, high=1 / self.low, resamples=-self.resamples)


def ratio_interval(a: Sequence[int], b: Sequence[int], resolution: float = 1.0) -> Interval:
    """Ratio of ``b``'s time to ``a``'s with its 95% interval. ``a[i]`` and ``b[i]``, ns, are a pair.

    ``resolution`` is the clock's grid, ns; of samples that are means over calls, divided by the number of calls. Where the
    readings show a coarser grid (``_grid``), it is used. Raises ValueError: lengths that differ, fewer than two pairs, a time
    that is not positive."""
    if len(a) != len(b):
        raise ValueError(f"a holds {len(a)} samples and b {len(b)}; pairs need as many of each")
    if len(a) < 2:
        raise ValueError(f"there are {len(a)} pairs; an interval needs at least 2")
    times = _positive([a, b])
    return _median_interval(np.log(times[1] / times[0]), _seed(times), sum(_half_tick(one, resolution) for one in times))


def call(interval: Interval) -> Call:
    """The verdict that an interval supports: equivalent where it is within MARGIN (two one-sided tests, at 2.5% each),
    else faster or slower where 1 is outside it, else undecided."""
    if interval.low >= 1 / (1 + MARGIN) and interval.high <= 1 + MARGIN:
        return "equivalent"
    if interval.low > 1:
        return "faster"
    if interval.high < 1:
        return "slower"
    return "undecided"


def geometric_mean(intervals: Sequence[Interval]) -> Interval:
    """Geometric mean of rows' ratios. Each row is resampled by itself: the rows are all that was asked about, not a sample of
    more, so the spread between rows does not widen the interval. Its bound is the mean of theirs, as if every clock erred the
    same way. Raises ValueError: no interval."""
    if not intervals:
        raise ValueError("a geometric mean needs at least one ratio")
    centre = float(np.mean([math.log(interval.ratio) for interval in intervals]))
    resamples = np.mean([interval.resamples for interval in intervals], axis=0)
    bound = float(np.mean([interval.bound for interval in intervals]))
    outliers = sum(interval.outliers for interval in intervals)
    return _around(centre, resamples, bound, sum(interval.pairs for interval in intervals), 1, outliers)


def time_interval(times: Sequence[int], resolution: float = 1.0) -> Interval:
    """Median of times in ns, with its 95% interval: ``ratio`` is the median, and ``pairs`` counts samples. Raises ValueError:
    fewer than two samples, a time that is not positive."""
    if len(times) < 2:
        raise ValueError(f"there are {len(times)} samples; an interval needs at least 2")
    series = _positive(times)
    return _median_interval(np.log(series), _seed(series), _half_tick(series, resolution))


def _positive(times: Sequence[int] | Sequence[Sequence[int]]) -> Floats:
    series = np.asarray(times, dtype=np.float64)
    if not np.all(series > 0):
        raise ValueError(f"the least time is {series.min():g} ns; every time must be above 0")
    return series


def quotient(above: Interval, below: Interval) -> Interval:
    """The ratio of two measurements that are independent, with its interval; their bounds add."""
    centre = math.log(above.ratio / below.ratio)
    resamples = above.resamples - below.resamples
    fewer = min(above, below, key=lambda one: one.freedom)
    return _around(centre, resamples, above.bound + below.bound, fewer.pairs, fewer.block, above.outliers + below.outliers)


def _median_interval(logs: Floats, seed: int, bound: float) -> Interval:
    """The median of ``logs`` and its interval, by the block bootstrap that the module's docstring describes."""
    centre = float(np.median(logs))
    block, widening = _block_and_widening(logs)
    resamples = centre + widening * (_resampled_medians(logs, block, seed) - centre)
    return _around(centre, resamples, bound, len(logs), block, _outliers(logs))


def _around(centre: float, resamples: Floats, bound: float, pairs: int, block: int, outliers: int) -> Interval:
    """An interval from replicates of a log ratio, widened by ``bound`` either way."""
    low, high = np.quantile(resamples, (_TAIL, 1 - _TAIL))
    ends = math.exp(min(float(low), centre) - bound), math.exp(max(float(high), centre) + bound)
    return Interval(math.exp(centre), *ends, pairs, block, outliers, bound, resamples)


def _resampled_medians(logs: Floats, block: int, seed: int) -> Floats:
    """Medians of [RESAMPLES] series made of blocks of ``logs``, which is treated as circular."""
    count = len(logs)
    starts = np.random.default_rng(seed).integers(0, count, (RESAMPLES, -(-count // block)))
    blocks = np.concatenate([logs, logs[: block - 1]])[np.arange(count)[:, None] + np.arange(block)]  # [count, block]
    ordered = blocks.take(starts, axis=0).reshape(RESAMPLES, -1)[:, :count]
    ordered.sort(axis=1)  # a quarter of the time of np.median, and the same bits
    return np.asarray((ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2)


def _seed(times: Floats) -> int:
    """The seed of a resampling, from the samples: the same record gives the same interval, two rows independent ones."""
    return zlib.crc32(times.tobytes())


def _block_and_widening(logs: Floats) -> tuple[int, float]:
    """The block length in pairs, and the factor of corrections 2 and 3 by which the interval is widened."""
    count, rho = len(logs), _autocorrelation(logs)
    alpha = 4 * rho**2 / (1 - rho**2) ** 2
    block = min(max(math.ceil(1.1447 * (alpha * count) ** (1 / 3)), 1), max(count // 4, 1))
    lags = np.arange(1, block)
    seen = 1 + 2 * float(np.sum((1 - lags / block) * rho**lags))
    lost = math.sqrt((1 + rho) / (1 - rho) / seen)
    share = block / count
    critical = 1.9600 + 2.9694 * share + 0.4160 * share**2 - 0.5324 * share**3
    return block, lost * critical / _NORMAL


def _autocorrelation(logs: Floats) -> float:
    """First autocorrelation of the ranks (outliers would hide it in the values), corrected upwards; from 0 to 0.95."""
    count = len(logs)
    _, place, ties = np.unique(logs, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]
    ranks = ranks - ranks.mean()
    spread = float(ranks @ ranks)
    if spread == 0 or count < 5:
        return 0.0
    raw = float(ranks[:-1] @ ranks[1:]) / spread
    corrected = (count * raw + 1) / (count - 3) + 0.5 * math.sqrt(max(1 - raw**2, 0) / count)
    return min(max(corrected, 0.0), 0.95)


def _half_tick(series: Floats, resolution: float) -> float:
    """Half a tick of the clock over the median of the readings, in log units: how far off each reading may be."""
    return math.log1p(_grid(series, resolution) / (2 * float(np.median(series))))


def _grid(series: Floats, resolution: float) -> float:
    """The coarser of the stated resolution and, where at least half of the readings repeat another, the grid that they show."""
    values = np.unique(series)
    if 1 < len(values) <= len(series) / 2:
        return max(resolution, float(np.min(np.diff(values))))
    return resolution


def _student(tail: float, freedom: float) -> float:
    """The upper ``tail`` quantile of Student's t."""
    from scipy.special import stdtrit  # a quarter of a second to import, which a command that needs no t should not take

    return -float(stdtrit(freedom, tail))


def _tail(t: float, freedom: float) -> float:
    """The probability that Student's t exceeds ``t``."""
    from scipy.special import stdtr

    return float(stdtr(freedom, -t))


def _outliers(logs: Floats) -> int:
    """Pairs beyond Tukey's fences: a count for the reader, not a reason to drop them."""
    first, third = np.quantile(logs, [0.25, 0.75])
    reach = 1.5 * (third - first)
    return int(np.sum((logs < first - reach) | (logs > third + reach)))
