"""tools/random_problems.py: what several processes found, and what it says without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def tool(tool_named: Callable[[str], ModuleType]) -> ModuleType:
    return tool_named("random_problems")


def test_what_processes_found_is_summed(tool: ModuleType) -> None:
    one = {"cases": 2, "right": {"split_triton": 2}, "features": {"window": 1, "plain": 1}, "wrong": []}
    other = {"cases": 1, "right": {}, "features": {}, "wrong": ["7: NaN"]}
    failed = {"cases": 0, "right": {}, "features": {}, "wrong": [], "failed": "out of memory"}
    assert tool.together([one, other, failed]) == {
        "cases": 3,
        "right": {"split_triton": 2},
        "right_by_feature": {"plain": 1, "window": 1},
        "wrong": ["7: NaN"],
        "processes_that_failed": ["out of memory"],
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_is_called_right(tool: ModuleType) -> None:
    found = tool.measure(5, 1, 0.1, ["fwd_triton"])
    assert found["cases"] == 0
    assert "no GPU is visible" in found["processes_that_failed"][0]
