"""A figure of speed that no cited claim or run gives is named; one that is given, rounded as it is written, is not."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tool(tool_named: Callable[[str], ModuleType]) -> ModuleType:
    return tool_named("figures_in_text")


@pytest.fixture
def sources(tool: ModuleType) -> Any:
    """Run r1 gives 20 us, 1.5x and 70% of a peak."""
    made = tool.Sources([], [], [])
    made.numbers["r1"] = [("ns", 20_000.0), ("ratio", 1.4972), ("peak", 70.2)]
    made.numbers["half-again"] = [("ratio", 1.4)]
    return made


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("1.7x", "ratio", 1.7),
        ("**3.7x** faster", "ratio", 3.7),
        ("1.36 ms", "ns", 1.36e6),
        ("0.318ms,", "ns", 318e3),
        ("12 µs and", "ns", 12e3),
        ("| 1,024 us |", "ns", 1.024e6),
        ("242 TFLOP/s", "tflops", 242),
        ("29% slower", "percent", 29),
        ("90% of its theoretical peak", "peak", 90),
        ("```\n1.36 ms\n```", "ns", 1.36e6),
    ],
)
def test_figures_of_speed_are_found(tool: ModuleType, text: str, unit: str, value: float) -> None:
    (found,) = tool.figures_in(text)
    assert (found.unit, found.value) == (unit, pytest.approx(value))


@pytest.mark.parametrize("text", ["tiles of 64 x 128", "95% intervals", "v1.7x2", "Python 3.11", "2 MB", "sm_80", "1x1 grids"])
def test_other_numbers_are_no_figures(tool: ModuleType, text: str) -> None:
    assert list(tool.figures_in(text)) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("It takes 1.36 ms.\n", ["1: 1.36 ms: no run gave this"]),
        ("It takes 20 us, 1.5x fa3 and 1.50x, by run r1.\n", []),
        ("1.4972x, 50% faster, 33% faster, 70% of peak, by r1\n", []),
        ("1.4971x, by r1\n", ["1: 1.4971x: r1, cited there, give no such number"]),
        ("1.4x <!-- claim: half-again -->\n", []),
        ("\n\n20 us\n", ["3: 20 us: it cites no claim and no run; r1 gives such a number"]),
        ("run r10 takes 20 us\n", ["1: 20 us: it cites no claim and no run; r1 gives such a number"]),
        ("by r1\n\nso 1.5x\n", ["3: 1.5x: it cites no claim and no run; r1 gives such a number"]),
        ("<!-- generated:x -->\n1.5x\n\n1.36 ms\n<!-- end generated:x -->\n", ["4: 1.36 ms: no run gave this"]),
        ("2x, by r1\n", ["1: 2x: r1, cited there, give no such number"]),
    ],
)
def test_an_unbacked_figure_is_named_with_its_line(tool: ModuleType, sources: Any, text: str, told: list[str]) -> None:
    assert tool.unbacked(text, sources) == told
