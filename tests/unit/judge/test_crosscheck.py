"""What a comparison of clocks comes to: agreement within 3%, a drift of our own, a tool without a number."""

from __future__ import annotations

from typing import Any

import pytest

from flashmoe_science.judge.crosscheck import agreement, agreements, tools_that_agree
from flashmoe_science.records import CrossCheckRow
from flashmoe_science.store import Run

PROBLEM = "attn b1 h1 q512 d64 fp16"


def row(**changes: Any) -> CrossCheckRow:
    fields: dict[str, Any] = {
        "run": "r1",
        "problem": PROBLEM,
        "kernel": "fwd_triton",
        "config": "",
        "cache": "warm",
        "tool": "a tool",
        "tool_version": "1",
        "method": "median",
        "time_ns": 5000.0,
        "ours": [5000] * 10,
    }
    return CrossCheckRow(**(fields | changes))


@pytest.mark.parametrize(
    ("time_ns", "said"), [(5000.0, "agrees"), (5149.0, "agrees"), (4851.0, "agrees"), (5151.0, "differs"), (4849.0, "differs")]
)
def test_three_percent_either_way_is_agreement(time_ns: float, said: str) -> None:
    found = agreement("h200", row(time_ns=time_ns))
    assert found.said == said
    assert found.difference == pytest.approx(time_ns / 5000 - 1)


def test_our_own_drift_decides_nothing() -> None:
    """The tool's time lies between our two medians, and near neither."""
    found = agreement("h200", row(time_ns=5250.0, ours=[5000] * 5 + [5500] * 5))
    assert (found.said, found.drift) == ("undecided", pytest.approx(0.1))
    assert "our own clock moved by +10.0%" in str(found.why)


def test_one_stray_sample_changes_nothing() -> None:
    assert agreement("h200", row(ours=[50_000, *[5000] * 9])).said == "agrees"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"time_ns": None, "reason": "it is not installed"}, "it is not installed"),
        ({"ours": []}, "gave no time"),
        ({"time_ns": 0.0}, "a time is zero"),
        ({"ours": [0] * 10}, "a time is zero"),
    ],
)
def test_what_is_lacking_is_said_and_there_is_no_number(changes: dict[str, Any], why: str) -> None:
    found = agreement("h200", row(**changes))
    assert (found.said, found.time_ns, found.difference) == ("no number", None, None)
    assert why in str(found.why)


def test_the_latest_run_of_a_problem_tool_and_cache_stands(fabricate: Any) -> None:
    old, new = fabricate("old", started="2026-01-01T00:00:00+00:00"), fabricate("new", started="2026-02-01T00:00:00+00:00")
    runs = [
        Run(new.header, (row(run="new", time_ns=6000.0),)),
        Run(old.header, (row(run="old"), row(run="old", cache="cold"), row(run="old", tool="another"))),
    ]
    found = agreements(runs)
    assert {(one.tool, one.cache, one.run, one.said) for one in found} == {
        ("a tool", "warm", "new", "differs"),
        ("a tool", "cold", "old", "agrees"),
        ("another", "warm", "old", "agrees"),
    }


def test_a_tool_agrees_on_a_problem_only_if_it_does_on_each_cache() -> None:
    other = "attn b1 h8 q2048 d64 fp16"
    rows = [row(), row(cache="cold", time_ns=9000.0), row(problem=other), row(tool="absent", time_ns=None)]
    assert tools_that_agree(agreement("h200", one) for one in rows) == {"a tool": (1, 2), "absent": (0, 1)}
