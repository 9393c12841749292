"""One call repeated, with a kernel and a clock that the test holds."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashmoe_science.measure.worker import repeats
from flashmoe_science.measure.worker.repeats import repeated


def test_results_of_one_call_may_be_parts_of_one_tensor() -> None:
    _, facts = repeated(lambda: torch.ones(2, 4).unbind(), 3, 0.0, lambda: None)
    assert not facts["shared"]
    buffer = torch.ones(2, 4)
    _, facts = repeated(lambda: buffer.unbind(), 3, 0.0, lambda: None)
    assert facts["shared"]


@pytest.mark.parametrize(
    ("seconds", "times"),
    [
        (0.0, 256),  # no time at all: more often than it was asked to
        (0.1, 10),
        (2**-6, 32),  # half a second
        (6.0, 2),  # 6 and 12 s: no third
    ],
)
def test_calls_are_repeated_as_often_as_asked_or_as_a_message_may_take(
    seconds: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count(0.0, seconds)
    monkeypatch.setattr(repeats, "_monotonic", lambda: next(now))
    _, facts = repeated(lambda: (torch.ones(4),), 10, 0.5, lambda: None)
    assert facts.pop("times") == times
    assert not any(facts.values()), "the calls of an honest kernel differ in nothing"
