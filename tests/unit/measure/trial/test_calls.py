"""Single calls of a candidate, with a player and a clock that the test holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashmoe_science.contract import built_in
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.trial import calls
from flashmoe_science.measure.trial.calls import Caller
from flashmoe_science.problem import parse_problem


class Doubles:
    """Returns twice its first input, and from call ``off_from`` on a bit more."""

    def __init__(self, off_from: int) -> None:
        self.off_from, self.calls = off_from, itertools.count()

    def bind(self, inputs: dict[str, torch.Tensor], clock: str) -> Callable[[], Any]:
        first = next(iter(inputs.values()))
        return lambda: first * 2 + (next(self.calls) >= self.off_from)

    def outputs(self, result: Any) -> tuple[Any, ...]:
        return (result,)


@pytest.mark.parametrize(
    ("off_from", "seconds", "said"),
    [
        (99, 0.0, {"differs_at": None, "times": 10}),
        (4, 0.0, {"differs_at": 4, "times": 4}),
        (99, 6.0, {"differs_at": None, "times": 3}),  # 6, 12 and 18 s: no fourth
        (3, 6.0, {"differs_at": 3, "times": 3}),
    ],
)
def test_calls_are_repeated_as_often_as_asked_or_as_a_message_may_take(
    off_from: int, seconds: float, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count(0.0, seconds)
    monkeypatch.setattr(calls, "_monotonic", lambda: next(now))
    problem, cpu = parse_problem("attn b1 h1 q4 d8 fp32"), Bench(torch.device("cpu"), None)
    caller = Caller(built_in("attention"), problem, cpu, lambda *who: Doubles(off_from))
    assert caller.repeat("", "", {"seed": 1}, times=10) == said
