"""Fabricated runs on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.fabricated import Fabricate

from flashmoe_science.store import RunWriter


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Path]:
    """Writes runs in the making into a folder, one file each, and returns the folder."""

    def write(*runs: Fabricate, folder: Path = tmp_path / "evidence") -> Path:
        for run in runs:
            with RunWriter(folder / "runs" / f"{run.name}.jsonl") as writer:
                for row in (run.header, *run.done().rows):
                    writer.append(row)
        return folder

    return write
