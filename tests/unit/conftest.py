"""The command line in this process, as wide as a pipe; Triton's interpreter in another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.interpreter import Interpreter

from flashmoe_science.cli.main import main


@pytest.fixture(autouse=True)
def _as_wide_as_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # which parallel test runs set


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is judged is kept in a folder of these tests, which pytest's workers share."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"))
        yield


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreter]:
    """Runs a script of this folder in Triton's interpreter, and gives what it prints."""
    with Interpreter() as interpreter:
        yield interpreter


@pytest.fixture
def flashmoe(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command; gives its exit code, what it printed and what it complained."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return run
