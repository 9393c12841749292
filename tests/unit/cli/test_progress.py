"""Time left that can be believed, lines off a terminal, and pairs as they come on one."""

from __future__ import annotations

import io

import pytest
from flashmoe_science.measure.session import Estimate, Progress
from rich.console import Console

from flashmoe_science.cli import progress as module
from flashmoe_science.cli.progress import Screen, begins_anew, time_left


@pytest.mark.parametrize(
    ("elapsed", "share", "words"),
    [
        (4.0, 0.5, ""),  # too early to tell
        (60.0, 0.01, ""),
        (60.0, 1.0, ""),  # nothing is left
        (30.0, 0.5, "about 30 s left"),
        (8.0, 0.9, "about 5 s left"),
        (100.0, 0.5, "about 2 min left"),
        (600.0, 0.1, "about 1.5 h left"),
    ],
)
def test_the_time_left_goes_by_the_pace_so_far(elapsed: float, share: float, words: str) -> None:
    assert time_left(elapsed, share) == words


@pytest.mark.parametrize(
    ("before", "now", "anew"),
    [
        (Progress(0, 9, "a"), Progress(1, 9, "b"), False),
        (Progress(0, 9, "a"), Progress(0, 5, "b"), True),  # builds, then cases
        (Progress(5, 9, "a"), Progress(0, 9, "b"), True),
        (Progress(9, 9, "a"), Progress(0, 3, "b", share=0.0), True),
        (Progress(99, 100, "builds", share=0.2), Progress(0, 3, "rounds", share=0.3), False),  # one session, several counts
        (Progress(3, 3, "measured", share=1.0), Progress(0, 3, "the next suite", share=0.0), True),
    ],
)
def test_time_is_counted_afresh_where_something_else_begins(before: Progress, now: Progress, anew: bool) -> None:
    assert begins_anew(before, now) is anew


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_off_a_terminal_a_line_comes_now_and_then(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Screen() as screen:
        for second in range(26):
            clock.now = float(second)
            screen.watch(Progress(second, 100, f"problem {second}", share=second / 50))
    assert capsys.readouterr().err.splitlines() == [
        "0% (0/100) problem 0",
        "20% (10/100) problem 10 about 40 s left",
        "40% (20/100) problem 20 about 30 s left",
    ]


def test_on_a_terminal_pairs_are_shown_as_estimates(clock: Clock) -> None:
    screen = Screen()
    for index in range(10):
        estimate = Estimate("attn b1 h1 q64 d64 fp16", "fwd", f"peer{index}", "graph clock, cold cache", 1.234)
        screen.watch(Progress(1, 4, "quick bench", 0.25, estimate))
    clock.now = 10.0
    out = Console(file=io.StringIO(), width=100)
    out.print(screen._shown())
    shown = out.file.getvalue()
    assert "25% 1/4 about 30 s left" in shown
    assert "not yet judged" in shown
    assert "~1.23" in shown
    assert "peer9" in shown
    assert "peer1 " not in shown  # the latest eight


def test_a_long_text_does_not_spill_over_its_line(clock: Clock) -> None:
    screen = Screen()
    screen.watch(Progress(0, 1, "word " * 100, 0.5))
    out = Console(file=io.StringIO(), width=60)
    out.print(screen._shown())
    assert max(map(len, out.file.getvalue().splitlines())) <= 60
    assert len(out.file.getvalue().splitlines()) == 2
