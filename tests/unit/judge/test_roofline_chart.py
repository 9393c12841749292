"""Where a roofline's lines and dots fall: measured against the two scales that its ticks give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from flashmoe_science.judge.diagnose.ceilings import Ceiling
from flashmoe_science.judge.diagnose.roofline import Point, Roofline, place
from flashmoe_science.judge.report.roofline_chart import Roof, RooflineChart, roofline_chart

PROBLEM = "attn b2 h8 q512 d64 fp16"
CEILINGS = {
    "dram": Ceiling("dram", 4e12, "B/s", True, "planted"),
    "tensor": Ceiling("tensor", 1e15, "FLOP/s", False, "planted"),
    "matmul": Ceiling("matmul", 8e14, "FLOP/s", True, "planted"),
    "fma": Ceiling("fma", 6e13, "FLOP/s", False, "planted"),
}


def points(*times: float) -> tuple[Point, ...]:
    return tuple(place(PROBLEM, f"kernel{index}", "", time, CEILINGS) for index, time in enumerate(times))  # type: ignore[arg-type]


def drawn(*times: float, **changes: Any) -> RooflineChart:
    roofline = Roofline("h200", "fp16", CEILINGS, points(*times))  # type: ignore[arg-type]
    chart = roofline_chart(replace(roofline, **changes), {f"kernel{index}": index for index in range(len(times))})
    assert chart is not None
    return chart


def scale(chart: RooflineChart, across: bool) -> Callable[[float], float]:
    """User units -> the quantity, by the first and last tick of a decade."""
    ticks = chart.across if across else chart.upward

    def value(label: str) -> float:
        number, _, unit = label.partition(" ")
        return float(number) * {"": 1, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[unit]

    first, last = ticks[0], ticks[-1]
    low, high = math.log10(value(first.label)), math.log10(value(last.label))
    return lambda at: 10 ** (low + (high - low) * (at - first.at) / (last.at - first.at))


def roof(chart: RooflineChart, level: str) -> Roof:
    return next(one for one in chart.roofs if one.level == level)


def test_a_dot_stands_at_its_intensity_and_speed() -> None:
    chart = drawn(20_000.0)
    (point,), (mark,) = points(20_000.0), chart.marks
    assert scale(chart, across=True)(mark.x) == pytest.approx(point.intensity("dram"))
    assert scale(chart, across=False)(mark.y) == pytest.approx(point.achieved)


def test_memory_rises_with_intensity_until_the_highest_ceiling() -> None:
    chart = drawn(20_000.0)
    slope, x, y = roof(chart, "dram"), scale(chart, across=True), scale(chart, across=False)
    assert y(slope.y1) / x(slope.x1) == pytest.approx(4e12)
    assert (x(slope.x2), y(slope.y2)) == pytest.approx((250.0, 1e15))
    assert math.degrees(math.atan2(slope.y2 - slope.y1, slope.x2 - slope.x1)) == pytest.approx(slope.turn)


def test_arithmetic_is_flat_from_where_memory_meets_it() -> None:
    chart = drawn(20_000.0)
    for level, value in (("tensor", 1e15), ("matmul", 8e14), ("fma", 6e13)):
        flat = roof(chart, level)
        assert flat.y1 == flat.y2
        assert scale(chart, across=False)(flat.y1) == pytest.approx(value)
        assert scale(chart, across=True)(flat.x1) == pytest.approx(value / 4e12)


def test_each_ceiling_says_whether_it_was_measured() -> None:
    labels = {one.level: (one.measured, one.label) for one in drawn(20_000.0).roofs}
    assert labels == {
        "dram": (True, "memory 4 TB/s, measured"),
        "tensor": (False, "tensor cores 1000 TFLOP/s, specified"),
        "matmul": (True, "matrix product 800 TFLOP/s, measured"),
        "fma": (False, "fp32 FMA 60 TFLOP/s, specified"),
    }


def test_everything_lies_inside_and_labels_do_not_lie_on_one_another() -> None:
    chart = drawn(2_000.0, 20_000.0, 2e9)
    for x, y in [(m.x, m.y) for m in chart.marks] + [(r.x1, r.y1) for r in chart.roofs] + [(r.x2, r.y2) for r in chart.roofs]:
        assert chart.left <= x <= chart.right
        assert chart.top <= y <= chart.bottom + 1e-6
    heights = sorted(one.label_y for one in chart.roofs if not one.turn)
    assert all(after - before >= 12 for before, after in pairwise(heights))


def test_kernels_without_a_colour_are_left_out() -> None:
    roofline = Roofline("h200", "fp16", CEILINGS, points(20_000.0, 30_000.0))  # type: ignore[arg-type]
    chart = roofline_chart(roofline, {"kernel1": 5})
    assert chart is not None
    assert [(mark.kernel, mark.colour) for mark in chart.marks] == [("kernel1", 5)]
    assert roofline_chart(roofline, {}) is None


def test_without_a_ceiling_there_is_no_chart() -> None:
    roofline = Roofline("cpu", "fp32", {}, tuple(replace(point, needs=()) for point in points(20_000.0)))
    assert roofline_chart(roofline, {"kernel0": 0}) is None
