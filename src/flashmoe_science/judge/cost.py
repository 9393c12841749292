"""What runs took: seconds and, where the user said what the machine costs, money. Pure over records.

A machine is paid for by the wall clock, so a run costs its wall seconds, building and checking included; a kernel costs the
seconds in which its calls were timed. Nothing is priced that no price was given for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.records import EndRow, TimingRow
from flashmoe_science.store import Run

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class RunCost:
    """One run. ``wall_seconds`` is None for a run that was cut: it took its ``timed_seconds`` at least.

    ``timed_seconds`` are those in which pairs were sampled, also where the samples were taken again later; ``kernels`` shares
    them out by name. ``usd`` is None where no price is known, and a lower bound for a run that was cut.
    """

    run: str
    suite: str
    gpu: str
    started: str
    wall_seconds: float | None
    timed_seconds: float
    kernels: Mapping[str, float]
    price_per_hour: float | None

    @property
    def usd(self) -> float | None:
        return self.money(self.timed_seconds if self.wall_seconds is None else self.wall_seconds)

    def money(self, seconds: float) -> float | None:
        """USD that so many seconds of this run's machine cost; None where no price is known."""
        return None if self.price_per_hour is None else self.price_per_hour * seconds / _HOUR_S


@dataclass(frozen=True, slots=True)
class TotalCost:
    """All runs together. ``usd`` is of the ``priced`` ones, None where there are none; ``cut`` runs count as in RunCost."""

    runs: int
    priced: int
    cut: int
    wall_seconds: float
    timed_seconds: float
    usd: float | None
    kernels: Mapping[str, float]  # seconds, the most expensive first
    kernels_usd: Mapping[str, float]


def at_price(runs: Sequence[Run], price_per_hour: float | None, *, every: bool) -> list[Run]:
    """The same runs at a price: every one, or those whose header holds none. A price of None changes nothing."""
    return [
        replace(run, header=run.header.model_copy(update={"price_per_hour": price_per_hour}))
        if price_per_hour is not None and (every or run.header.price_per_hour is None)
        else run
        for run in runs
    ]


def run_cost(run: Run) -> RunCost:
    """The cost of one run, at the price that its header holds."""
    rows = [row for row in run.rows if isinstance(row, TimingRow)]
    ends = [row for row in run.rows if isinstance(row, EndRow)]
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        # Both sides of a pair make as many calls, so each took its share of the seconds by its own samples.
        # Samples that no clock gives say nothing of it.
        share = sum(row.a) / sum((*row.a, *row.b)) if min((*row.a, *row.b), default=0) > 0 else 0.5
        seconds[row.kernel] += row.device_seconds * share
        seconds[row.rival] += row.device_seconds * (1 - share)
    header = run.header
    return RunCost(
        run=header.run,
        suite=header.suite,
        gpu=gpu_name(header.environment),
        started=header.started,
        wall_seconds=ends[-1].wall_seconds if ends else None,
        timed_seconds=math.fsum(row.device_seconds for row in rows),
        kernels=_most_first(seconds),
        price_per_hour=header.price_per_hour,
    )


def total_cost(costs: Sequence[RunCost]) -> TotalCost:
    """The sum over runs."""
    kernels: dict[str, float] = defaultdict(float)
    money: dict[str, float] = defaultdict(float)
    for cost in costs:
        for kernel, seconds in cost.kernels.items():
            kernels[kernel] += seconds
            if (usd := cost.money(seconds)) is not None:
                money[kernel] += usd
    priced = [cost.usd for cost in costs if cost.usd is not None]
    return TotalCost(
        runs=len(costs),
        priced=len(priced),
        cut=sum(cost.wall_seconds is None for cost in costs),
        wall_seconds=math.fsum(cost.timed_seconds if cost.wall_seconds is None else cost.wall_seconds for cost in costs),
        timed_seconds=math.fsum(cost.timed_seconds for cost in costs),
        usd=math.fsum(priced) if priced else None,
        kernels=_most_first(kernels),
        kernels_usd=_most_first(money),
    )


def _most_first(amounts: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(amounts.items(), key=lambda item: (-item[1], item[0])))
