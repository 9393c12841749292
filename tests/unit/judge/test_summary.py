"""Where the device's clock and a caller's say the opposite of a kernel, that is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashmoe_science.judge.standing import verdicts
from flashmoe_science.judge.summary import disagreements

Maker = Callable[..., Any]


def run(fabricate: Maker, eager: float) -> Any:
    """Faster than sdpa by device time, by 1.5; and as a caller waits, by so much."""
    made = fabricate().control().control(clock="eager").timed("fwd_triton", 20_000, "sdpa", 30_000)
    return made.timed("fwd_triton", 40_000, "sdpa", 40_000 * eager, clock="eager")


def test_it_is_said_where_the_clocks_disagree(fabricate: Maker) -> None:
    said = disagreements(verdicts([run(fabricate, 0.8).done()]))
    assert said[0] == (
        "fwd_triton on attn b2 h8 q512 d64 fp16: the clocks disagree: faster by device time (1.50x of sdpa), "
        "slower as a caller waits (0.80x of sdpa)"
    )
    assert said[1].startswith("sdpa on ")


@pytest.mark.parametrize("eager", [1.0, 1.2])
def test_neither_the_same_nor_a_tie_is_a_disagreement(fabricate: Maker, eager: float) -> None:
    assert disagreements(verdicts([run(fabricate, eager).done()])) == []
