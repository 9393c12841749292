"""Context attention on ranks that are processes of this machine is one process's call of the whole sequence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=[pytest.mark.slow, pytest.mark.again])])
def test_ranks_give_what_one_process_gives(ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.parallel.context_ranks"]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(tmp_path / "ranks")],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    ended = [(*process.communicate(timeout=300), process.returncode) for process in started]
    assert [code for _, _, code in ended] == [0] * ranks, "\n".join(complained[-2000:] for _, complained, _ in ended)
    assert [json.loads(printed.splitlines()[-1]) for printed, _, _ in ended] == [{}] * ranks
