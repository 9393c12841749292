"""A timing row as either of its two kernels sees it, with what speaks against believing it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_science.judge.stats import Interval
from flashmoe_science.judge.trust import Trust, measured
from flashmoe_science.problem import Problem
from flashmoe_science.records import Origin, TimingRow


@dataclass(frozen=True, slots=True)
class Pair:
    """One kernel beside a rival. Times are medians, ns a call; spreads are interquartile
    ranges over the median. ``interval`` is of the rival's time over the kernel's, None
    where the samples are no pairs. ``own_fault`` and ``rival_fault`` say why a kernel is not believed, ``shared_fault`` why
    the samples are not.
    """

    kernel: str
    config: str
    origin: Origin
    rival: str
    rival_config: str
    rival_origin: Origin
    time_ns: float
    rival_time_ns: float
    spread: float
    rival_spread: float
    interval: Interval | None
    own_fault: str | None
    rival_fault: str | None
    shared_fault: str | None
    quick: bool

    @property
    def believed(self) -> bool:
        return self.interval is not None and not (self.own_fault or self.rival_fault or self.shared_fault)

    def flipped(self) -> Pair:
        """The same row as the rival sees it."""
        return Pair(
            kernel=self.rival,
            config=self.rival_config,
            origin=self.rival_origin,
            rival=self.kernel,
            rival_config=self.config,
            rival_origin=self.origin,
            time_ns=self.rival_time_ns,
            rival_time_ns=self.time_ns,
            spread=self.rival_spread,
            rival_spread=self.spread,
            interval=self.interval.flipped() if self.interval else None,
            own_fault=self.rival_fault,
            rival_fault=self.own_fault,
            shared_fault=self.shared_fault,
            quick=self.quick,
        )


def pair_of(trust: Trust, problem: Problem, row: TimingRow) -> Pair:
    """Judge what a row's samples and kernels are worth, and take its ratio where they are pairs at all."""
    shared = trust.samples(row)
    if shared is None and len(row.a) < 2:
        shared = f"the number of pairs of samples is {len(row.a)}; an interval needs more"
    time, rival_time = (float(statistics.median(series)) if series else 0.0 for series in (row.a, row.b))
    own_fault, rival_fault = (
        trust.kernel(row.problem, kernel, config) or (None if shared else trust.too_fast(problem, own_time, row.cache))
        for kernel, config, own_time in ((row.kernel, row.config, time), (row.rival, row.rival_config, rival_time))
    )
    return Pair(
        kernel=row.kernel,
        config=row.config,
        origin=row.origin,
        rival=row.rival,
        rival_config=row.rival_config,
        rival_origin=row.rival_origin,
        time_ns=time,
        rival_time_ns=rival_time,
        spread=0.0 if shared else _spread(row.a),
        rival_spread=0.0 if shared else _spread(row.b),
        interval=None if shared else measured(row),
        own_fault=own_fault,
        rival_fault=rival_fault,
        shared_fault=shared,
        quick=row.quick,
    )


def _spread(samples: Sequence[int]) -> float:
    first, middle, third = statistics.quantiles(samples, n=4, method="inclusive")
    return (third - first) / middle
