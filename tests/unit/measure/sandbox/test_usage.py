"""Processor time that a function takes elsewhere, with a system's count that the test gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe_science.measure.sandbox import usage
from flashmoe_science.measure.sandbox.usage import Usage

OWN, STARTED = 7, 8


@pytest.mark.parametrize(
    ("others", "of_started", "one_thread", "words"),
    [
        (0.0, 0.0, True, None),
        (
            0.9,
            0.0,
            True,
            "other threads than the one that it and its rivals are timed on: 0.90 s of processors there in 2.00 s",
        ),
        (0.9, 0.0, False, None),
        (0.1, 0.4, True, None),
        (0.0, 2.0, False, "processes that it started work while it is timed: 2.00 s of processors in 4.00 s"),
    ],
)
def test_more_than_its_share_is_named(
    others: float, of_started: float, one_thread: bool, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for 2 of 4 seconds."""
    used, others_used = {OWN: 10.0, STARTED: 5.0}, [1.0]
    times = iter([100.0, 104.0])
    monkeypatch.setattr(usage, "marked", lambda mark: iter([OWN, STARTED]))
    monkeypatch.setattr(usage, "processor_seconds", used.__getitem__)
    monkeypatch.setattr(usage, "seconds_of_other_threads", lambda pid: others_used[0])
    monkeypatch.setattr(usage.time, "monotonic", lambda: next(times))
    child: Any = SimpleNamespace(pid=OWN, mark="m", asked_ns=10**9)
    counted = Usage(child, one_thread)
    others_used[0] += others
    used[STARTED] += of_started
    child.asked_ns += 2 * 10**9
    found = counted.too_much()
    assert found is None if words is None else words in str(found)
