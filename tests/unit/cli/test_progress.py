"""Lines off a terminal, a bar on one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashmoe_science.cli import progress


def test_off_a_terminal_a_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(progress, "time", clock)
    with progress.Screen() as screen:
        for second in range(26):
            clock.now = float(second)
            screen.watch(f"problem {second}", second, 100)
    assert capsys.readouterr().err.splitlines() == ["(0/100) problem 0", "(10/100) problem 10", "(20/100) problem 20"]
