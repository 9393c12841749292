"""Lines off a terminal, a bar on one."""

from __future__ import annotations

import pytest

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
    assert capsys.readouterr().err.splitlines() == ["(0/100) problem 0", "(10/100) problem 10", "(20/100) problem 20"]
