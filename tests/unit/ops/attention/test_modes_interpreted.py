"""split_triton in Triton's interpreter on small problems of every mode, held as the exam holds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe_science.ops.attention.suites_serving import small


@pytest.fixture(scope="module")
def reasons() -> dict[str, list[str]]:
    command = [sys.executable, str(Path(__file__).parent / "modes_cases.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("text", list(small()))
def test_a_problem_with_modes_is_right(text: str, reasons: dict[str, list[str]]) -> None:
    assert reasons[text] == []
