"""Commands print as into a pipe of its own width, however the tests are run."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _as_wide_as_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # which parallel test runs set
