"""Where a roofline's lines and dots fall: measured against the two scales that its ticks give."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from flashmoe_science.judge.diagnose.roofline import Ceiling, Point, Roofline, place
from flashmoe_science.judge.report.charts import Chart, roofline_chart

PROBLEM = "attn b2 h8 q512 d64 fp16"
CEILINGS = {
    "dram": Ceiling("dram", 4e12, "B/s", True, "planted"),
    "tensor": Ceiling("tensor", 1e15, "FLOP/s", False, "planted"),
    "matmul": Ceiling("matmul", 8e14, "FLOP/s", True, "planted"),
    "fma": Ceiling("fma", 6e13, "FLOP/s", False, "planted"),
}


def point(time: float) -> Point:
    return place(PROBLEM, "kernel", "", time, CEILINGS)  # type: ignore[arg-type]


def drawn(time: float) -> Chart:
    chart = roofline_chart(Roofline("h200", "fp16", CEILINGS, (point(time),)), {"kernel": 0})  # type: ignore[arg-type]
    assert chart is not None
    return chart


def scale(chart: Chart, across: bool) -> Callable[[float], float]:
    """User units -> the quantity, by the first and last tick of a decade."""
    ticks = chart.x_ticks if across else chart.y_ticks

    def value(label: str) -> float:
        number, _, unit = label.partition(" ")
        return float(number) * {"": 1, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[unit]

    first, last = ticks[0], ticks[-1]
    low, high = math.log10(value(first.label)), math.log10(value(last.label))
    return lambda at: 10 ** (low + (high - low) * (at - first.at) / (last.at - first.at))


def test_a_dot_stands_at_its_intensity_and_speed() -> None:
    chart = drawn(20_000.0)
    (mark,) = chart.dots
    assert scale(chart, across=True)(mark.x) == pytest.approx(point(20_000.0).intensity("dram"))
    assert scale(chart, across=False)(mark.y) == pytest.approx(point(20_000.0).achieved)


def test_memory_rises_with_intensity_until_the_highest_ceiling() -> None:
    chart = drawn(20_000.0)
    slope, x, y = next(one for one in chart.lines if one.name == "dram"), scale(chart, across=True), scale(chart, across=False)
    (x1, y1), _, (x2, y2) = slope.points
    assert y(y1) / x(x1) == pytest.approx(4e12)
    assert (x(x2), y(y2)) == pytest.approx((250.0, 1e15))
