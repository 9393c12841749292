"""The plugin that runs FlashAttention's tests, on a file that stands in for theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.tools.conftest import TOOLS

THEIRS = """
import pytest, torch, time
from flash_attn import flash_attn_func
from flash_attn.bert_padding import unpad_input
from flash_attn.flash_attn_interface import USE_TRITON_ROCM
from flash_attn_interface import flash_attn_with_kvcache

@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q, k", [(n, n + 1) for n in range(1, 1001)])
def test_many(q, k, causal):
    rows, keys = torch.zeros(1, q, 2, 8), torch.zeros(1, k, 2, 8)
    assert flash_attn_func(rows, keys, keys, 0.0, None, causal).shape == rows.shape

@pytest.mark.parametrize("heads", [2, 3])
def test_refused(heads):
    flash_attn_func(torch.zeros(1, 3, 5, 8), *[torch.zeros(1, 3, heads, 8)] * 2)

def test_private():
    from flash_attn.flash_attn_interface import flash_attn_gpu

def test_slow():
    time.sleep(30)

def test_wrong():
    assert 0, "wrong"
"""


def test_a_sample_is_run_and_its_results_are_counted(tmp_path: Path) -> None:
    theirs, counts = tmp_path / "test_theirs.py", tmp_path / "counts.json"
    theirs.write_text(THEIRS)
    options = ["-p", "flash_attention_tests", "--flash-attention", tmp_path, "--cases", 30, "--limit", 4, "--counts", counts]
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "no:cacheprovider", *map(str, options), str(theirs)]
    path = os.pathsep.join((str(TOOLS), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert counts.exists(), done.stdout + done.stderr
    found = json.loads(counts.read_text())
    assert found["counts"] == {"passed": 30, "skipped": 0, "xfailed": 0, "not served": 3, "out of time": 1, "failed": 1}
    reasons = found["not served"]
    assert sorted(reasons.values()) == [1, 2]
    assert any("k has N heads and q has N" in one for one in reasons), reasons
    assert sorted(line for _, line in found["failures"]) == ["AssertionError: wrong", "TimeoutError: 4 seconds have passed"]
