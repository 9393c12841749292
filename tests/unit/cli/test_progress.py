"""Lines off a terminal, a bar on one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flashmoe_science.cli import progress as module
from flashmoe_science.cli.progress import Screen
from flashmoe_science.measure.session import Progress


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
            screen.watch(Progress(second, 100, f"problem {second}"))
    assert capsys.readouterr().err.splitlines() == [
        "(0/100) problem 0",
        "(10/100) problem 10",
        "(20/100) problem 20",
    ]


def test_on_a_terminal_a_bar_says_how_many_and_how_long(clock: Clock) -> None:
    screen = Screen()
    screen.watch(Progress(1, 4, "quick bench"))
    clock.now = 70.0
    out = Console(file=io.StringIO(), width=100)
    out.print(screen._shown())
    assert "1/4 1:10" in out.file.getvalue()
    assert "quick bench" in out.file.getvalue()


def test_a_long_text_does_not_spill_over_its_line(clock: Clock) -> None:
    screen = Screen()
    screen.watch(Progress(0, 1, "word " * 100))
    out = Console(file=io.StringIO(), width=60)
    out.print(screen._shown())
    assert max(map(len, out.file.getvalue().splitlines())) <= 60
    assert len(out.file.getvalue().splitlines()) == 2
