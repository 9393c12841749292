"""The command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flashmoe_science.cli.main import main


@pytest.fixture
def flashmoe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs a command as into a pipe; gives its exit code, what it printed and what it complained."""
    monkeypatch.delenv("COLUMNS", raising=False)  # which parallel test runs set

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run
