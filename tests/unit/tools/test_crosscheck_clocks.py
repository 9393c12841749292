"""What a comparison of clocks comes to: agreement within 3%, a drift of our own, a tool without a number."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def outcome(tool_named: Callable[[str], ModuleType]) -> Callable[..., Any]:
    tool = tool_named("crosscheck_clocks")

    def of(**changes: Any) -> Any:
        about = {"run": "r1", "problem": "attn b1 h1 q512 d64 fp16", "kernel": "fwd_triton", "config": "", "cache": "warm"}
        by = {"tool": "a tool", "tool_version": "1", "method": "median", "time_ns": 5000.0, "ours": [5000] * 10}
        return tool.agreement(tool.CrossCheckRow(**about | by | changes))

    return of


@pytest.mark.parametrize(
    ("time_ns", "said"), [(5000.0, "agrees"), (5149.0, "agrees"), (4851.0, "agrees"), (5151.0, "differs"), (4849.0, "differs")]
)
def test_three_percent_either_way_is_agreement(outcome: Callable[..., Any], time_ns: float, said: str) -> None:
    found = outcome(time_ns=time_ns)
    assert (found.outcome, found.difference) == (said, pytest.approx(time_ns / 5000 - 1))


def test_our_own_drift_decides_nothing(outcome: Callable[..., Any]) -> None:
    """The tool's time lies between our two medians, and near neither."""
    found = outcome(time_ns=5250.0, ours=[5000] * 5 + [5500] * 5)
    assert (found.outcome, found.drift) == ("undecided", pytest.approx(0.1))
    assert "our own clock moved by +10.0%" in str(found.why)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"time_ns": None, "reason": "it is not installed"}, "it is not installed"),
        ({"ours": []}, "gave no time"),
        ({"time_ns": 0.0}, "a time is zero"),
    ],
)
def test_what_is_lacking_is_said_and_there_is_no_number(outcome: Callable[..., Any], changes: dict[str, Any], why: str) -> None:
    found = outcome(**changes)
    assert (found.outcome, found.difference) == ("no number", None)
    assert why in str(found.why)
