"""What runs took: seconds and, where a run recorded what its machine costs, money.

A machine is paid for by the wall clock, so a run costs its wall seconds, building and checking included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_science.judge.formats import duration, usd
from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.records import EndRow, TimingRow
from flashmoe_science.store import Run

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class RunCost:
    """One run. ``wall_seconds`` is None for a run that was cut short: it took its ``timed_seconds``, those in which pairs were
    sampled, at least. ``price_per_hour`` is USD, None where it is not known."""

    run: str
    suite: str
    gpu: str
    wall_seconds: float | None
    timed_seconds: float
    price_per_hour: float | None

    @property
    def usd(self) -> float | None:
        """What the run cost; of a run that was cut short, the least."""
        seconds = self.timed_seconds if self.wall_seconds is None else self.wall_seconds
        return None if self.price_per_hour is None else self.price_per_hour * seconds / _HOUR_S


def run_cost(run: Run) -> RunCost:
    """The cost of one run at the price that its record holds."""
    header = run.header
    return RunCost(
        run=header.run,
        suite=header.suite,
        gpu=gpu_name(header.environment),
        wall_seconds=next((row.wall_seconds for row in run.rows if isinstance(row, EndRow)), None),
        timed_seconds=math.fsum(row.device_seconds for row in run.rows if isinstance(row, TimingRow)),
        price_per_hour=header.price_per_hour,
    )


def cost_line(costs: Sequence[RunCost]) -> str:
    """Time and money of all runs in one line: "2 runs, 20 min 00 s, of which 2.0 s timed: $1.20"."""
    if not costs:
        return "nothing was run"
    known = [cost.usd for cost in costs if cost.usd is not None]
    cut = sum(cost.wall_seconds is None for cost in costs)
    timed = math.fsum(cost.timed_seconds for cost in costs)
    wall = math.fsum(cost.timed_seconds if cost.wall_seconds is None else cost.wall_seconds for cost in costs)
    words = f"{len(costs)} run{'s' * (len(costs) != 1)}, {duration(wall)}, of which {duration(timed)} timed"
    if known:
        words += f": {usd(math.fsum(known))}" + (f" for the {len(known)} that have a price" if len(known) < len(costs) else "")
    else:
        words += "; no price is known"
    return words + (f"; {cut} {'was' if cut == 1 else 'were'} cut short and took this at least" if cut else "")
