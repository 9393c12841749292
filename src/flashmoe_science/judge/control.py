"""The A/A control: a kernel timed against itself, which measures the harness's own error in a ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashmoe_science.judge.stats import MIN_PAIRS, Interval, call, ratio_interval
from flashmoe_science.records import TimingRow

# CUDA documents events as accurate to about half a microsecond; one sample spans ``calls`` calls.
_EVENT_RESOLUTION_NS = 500.0


@dataclass(frozen=True, slots=True)
class Control:
    """The harness's error on a problem, by its kernel-against-itself control.

    ``reason`` is why no number of the problem is believed: the control differs from 1 by more than chance explains in a run
    with that many controls. Where it is None, the harness may be off by ``bias`` (log units), 0 if the control came out
    equivalent."""

    interval: Interval | None
    bias: float
    reason: str | None


def is_control(row: TimingRow) -> bool:
    return row.kernel == row.rival and row.config == row.rival_config


def measured(row: TimingRow) -> Interval:
    """A timing row's ratio."""
    return ratio_interval(row.a, row.b, resolution_of(row))


def resolution_of(row: TimingRow) -> float:
    """The clock's grid in ns: a graph's samples are timed by device events, the others by a wall clock good to a nanosecond."""
    return _EVENT_RESOLUTION_NS / row.calls if row.clock == "graph" else 1.0


def control_of(row: TimingRow, fault: str | None, controls: int) -> Control:
    """The result of one control row, of ``controls`` in its run; ``fault`` is why its samples are not trusted."""
    if fault is None and len(row.a) < MIN_PAIRS:
        fault = f"{len(row.a)} pairs of samples; {MIN_PAIRS} are the least that decide"
    if fault:
        return Control(None, 0.0, f"the kernel-against-itself control is not believed: {fault}")
    interval = measured(row)
    if call(interval) == "equivalent":
        return Control(interval, 0.0, None)
    bias = max(-math.log(interval.low), math.log(interval.high))
    if not interval.excludes_one(controls):
        return Control(interval, bias, None)
    words = f"{interval.ratio:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
    return Control(interval, bias, f"{row.kernel} against itself came out {call(interval)}: {words}")
