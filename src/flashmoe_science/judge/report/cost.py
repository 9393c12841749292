"""What runs took: seconds and, where it is known what the machine costs, money.

A machine is paid for by the wall clock, so a run costs its wall seconds, building and checking included; a kernel costs the
seconds in which its calls were timed. Nothing is priced without a price.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashmoe_science.judge.formats import duration, usd
from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.records import EndRow, TimingRow
from flashmoe_science.store import Run

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class RunCost:
    """One run. ``wall_seconds`` is None for a run that was cut short: it took its ``timed_seconds`` at least.

    ``timed_seconds`` are those in which pairs were sampled; ``kernels`` shares them out by name. ``price_per_hour`` is USD,
    None where it is not known.
    """

    run: str
    suite: str
    gpu: str
    wall_seconds: float | None
    timed_seconds: float
    kernels: Mapping[str, float]
    price_per_hour: float | None

    @property
    def seconds(self) -> float:
        """What is paid for; of a run that was cut short, the least."""
        return self.timed_seconds if self.wall_seconds is None else self.wall_seconds

    @property
    def usd(self) -> float | None:
        return self.money(self.seconds)

    def money(self, seconds: float) -> float | None:
        """USD that so many seconds of this run's machine cost; None where no price is known."""
        return None if self.price_per_hour is None else self.price_per_hour * seconds / _HOUR_S


def run_cost(run: Run, price_per_hour: float | None = None) -> RunCost:
    """The cost of one run at the price that its record holds, else at ``price_per_hour``."""
    rows = [row for row in run.rows if isinstance(row, TimingRow)]
    ends = [row for row in run.rows if isinstance(row, EndRow)]
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        # Both sides of a pair make as many calls, so each took its share of the seconds by its own samples. Samples of zero do
        # not tell the shares.
        share = sum(row.a) / sum((*row.a, *row.b)) if min((*row.a, *row.b), default=0) > 0 else 0.5
        seconds[row.kernel] += row.device_seconds * share
        seconds[row.rival] += row.device_seconds * (1 - share)
    header = run.header
    return RunCost(
        run=header.run,
        suite=header.suite,
        gpu=gpu_name(header.environment),
        wall_seconds=ends[-1].wall_seconds if ends else None,
        timed_seconds=math.fsum(row.device_seconds for row in rows),
        kernels=dict(seconds),
        price_per_hour=price_per_hour if header.price_per_hour is None else header.price_per_hour,
    )


@dataclass(frozen=True, slots=True)
class KernelCost:
    """One kernel over all runs: seconds in which it was timed, and their USD where a price is known."""

    kernel: str
    seconds: float
    usd: float | None


def kernel_costs(costs: Sequence[RunCost]) -> list[KernelCost]:
    """The most expensive first."""
    seconds: dict[str, float] = defaultdict(float)
    money: dict[str, float] = defaultdict(float)
    for cost in costs:
        for kernel, amount in cost.kernels.items():
            seconds[kernel] += amount
            if (priced := cost.money(amount)) is not None:
                money[kernel] += priced
    ordered = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))
    return [KernelCost(kernel, amount, money.get(kernel)) for kernel, amount in ordered]


def cost_line(costs: Sequence[RunCost]) -> str:
    """Time and money of all runs in one line: "2 runs, 20 min 00 s, of which 2.0 s timed: $1.20"."""
    if not costs:
        return "nothing was run"
    known = [cost.usd for cost in costs if cost.usd is not None]
    cut = sum(cost.wall_seconds is None for cost in costs)
    wall, timed = (duration(math.fsum(seconds)) for seconds in zip(*((c.seconds, c.timed_seconds) for c in costs), strict=True))
    words = f"{len(costs)} run{'s' * (len(costs) != 1)}, {wall}, of which {timed} timed"
    if known:
        words += f": {usd(math.fsum(known))}" + (f" for the {len(known)} that have a price" if len(known) < len(costs) else "")
    else:
        words += "; no price is known"
    return words + (f"; {cut} {'was' if cut == 1 else 'were'} cut short and took this at least" if cut else "")
