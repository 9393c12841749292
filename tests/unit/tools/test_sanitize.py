"""tools/sanitize.py with a compute-sanitizer that only says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TOOL = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
{lines}
"""
CLEAN = 'echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"'
FOUND = (
    'echo "========= Error: Race reported"\necho "========= RACECHECK SUMMARY: 10 hazards displayed (10 errors, 0 warnings)"'
)


@pytest.fixture(scope="module")
def tool(tool_named: Callable[[str], ModuleType]) -> ModuleType:
    return tool_named("sanitize")


@pytest.mark.parametrize(
    ("lines", "result", "clean"),
    [
        (CLEAN, "0 hazards displayed (0 errors, 0 warnings)", True),
        (FOUND, "10 hazards displayed (10 errors, 0 warnings)", False),
        ("echo unsupported device", "unsupported device", False),
        ("sleep 5", "stopped after 1 s", False),
    ],
)
def test_what_a_check_says_is_the_row(tool: ModuleType, tmp_path: Path, lines: str, result: str, clean: bool) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(TOOL.format(lines=lines), encoding="utf-8")
    program.chmod(0o755)
    row = tool.looked_at("moe_route", "racecheck", str(program), 1.0)
    assert (row["kernel"], row["check"], row["result"], tool.is_clean(row)) == ("moe_route", "racecheck", result, clean)


def test_every_call_has_an_answer_on_the_cpu(tool: ModuleType) -> None:
    for call in tool.CALLS.values():
        assert all(one.isfinite().all() for one in call()("cpu"))
