"""What is said first of a kernel: the device's clock, or both where they say the opposite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.judge.headline import disagreements, headline
from flashmoe_science.judge.standing import verdicts

Maker = Callable[..., Any]


def run(fabricate: Maker, eager: float) -> Any:
    """Faster than sdpa by device time, by 1.5; and as a caller waits, by so much."""
    made = fabricate().control().control(clock="eager").timed("fwd_triton", 20_000, "sdpa", 30_000)
    return made.timed("fwd_triton", 40_000, "sdpa", 40_000 * eager, clock="eager")


def test_device_time_leads_where_the_clocks_agree(fabricate: Maker) -> None:
    rows = [row for row in verdicts([run(fabricate, 1.2).done()]) if row.kernel == "fwd_triton"]
    found = headline(rows)
    assert (found.verdict.clock, found.against) == ("graph", None)
    assert found.words == "faster, 1.50x of sdpa"
    assert headline(rows[::-1]) == found
    assert disagreements(rows) == []


def test_neither_leads_where_they_disagree(fabricate: Maker) -> None:
    rows = verdicts([run(fabricate, 0.8).done()])
    found = headline([row for row in rows if row.kernel == "fwd_triton"])
    said = "the clocks disagree: faster by device time (1.50x of sdpa), slower as a caller waits (0.80x of sdpa)"
    assert found.words == said
    assert [one.verdict.kernel for one in disagreements(rows)] == ["fwd_triton", "sdpa"]


def test_a_tie_is_no_disagreement(fabricate: Maker) -> None:
    assert disagreements(verdicts([run(fabricate, 1.0).done()])) == []


@pytest.mark.parametrize(("eager", "times"), [(0.8, 1), (1.2, 0)])
def test_the_command_says_so_once(
    fabricate: Maker, recorded: Callable[..., Path], flashmoe: Callable[..., tuple[int, str, str]], eager: float, times: int
) -> None:
    _, out, _ = flashmoe("verdicts", "--evidence", recorded(run(fabricate, eager)))
    assert out.count("the clocks disagree") == times
