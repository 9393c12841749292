"""Lines off a terminal, a bar on one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flashmoe_science.cli import progress as module
from flashmoe_science.cli.progress import Screen


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
            screen.watch(f"problem {second}", second, 100)
    assert capsys.readouterr().err.splitlines() == [
        "(0/100) problem 0",
        "(10/100) problem 10",
        "(20/100) problem 20",
    ]


def test_on_a_terminal_one_line_says_how_many_how_long_and_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Console", lambda **_: Console(file=io.StringIO(), force_terminal=True, width=100))
    screen = Screen()
    screen.watch("[quick] bench " * 20, 1, 4)
    out = Console(file=io.StringIO(), width=100)
    out.print(screen._bar.make_tasks_table(screen._bar.tasks))
    (line,) = out.file.getvalue().splitlines()
    assert "1/4 0:00:00 [quick] bench" in line
    assert len(line) <= 100
