"""What runs took: seconds and, where a run recorded what its machine costs, money.

A machine is paid for by the wall clock, so a run costs its wall seconds, building and checking included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flashmoe_science.judge.formats import duration, usd
from flashmoe_science.records import EndRow, TimingRow
from flashmoe_science.store import Run

_HOUR_S = 3600.0


def cost_line(runs: Sequence[Run]) -> str:
    """Time and money of these runs in one line: "2 runs, 20 min 00 s, of which 2.0 s timed: $1.20"."""
    if not runs:
        return "nothing was run"
    timed = {one.header.run: math.fsum(row.device_seconds for row in one.rows if isinstance(row, TimingRow)) for one in runs}
    ended = {one.header.run: row.wall_seconds for one in runs for row in one.rows if isinstance(row, EndRow)}
    took = timed | ended  # a run that was cut short took the seconds in which pairs were sampled, at least
    prices = {one.header.run: one.header.price_per_hour for one in runs}
    known = [price * took[run] / _HOUR_S for run, price in prices.items() if price is not None]
    wall, sampled = (duration(math.fsum(seconds.values())) for seconds in (took, timed))
    words = f"{len(runs)} run{'s' * (len(runs) != 1)}, {wall}, of which {sampled} timed"
    if known:
        words += f": {usd(math.fsum(known))}" + (f" for the {len(known)} that have a price" if len(known) < len(runs) else "")
    else:
        words += "; no price is known"
    cut = len(runs) - len(ended)
    return words + (f"; {cut} {'was' if cut == 1 else 'were'} cut short and took this at least" if cut else "")
