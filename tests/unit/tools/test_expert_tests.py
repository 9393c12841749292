"""The plugin that runs others' tests of experts, on a file that stands in for Liger's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.tools.conftest import TOOLS

THEIRS = """
import torch
from liger_kernel.ops import LigerFusedMoEFunction
from liger_kernel.ops.fused_moe import compute_routing_metadata

def call(rows=3):
    ids, weights = torch.tensor([[0, 1]] * 3), torch.tensor([[0.25, 0.5]] * 3)
    return LigerFusedMoEFunction.apply(torch.ones(rows, 4), torch.ones(2, 6, 4), torch.ones(2, 4, 3), ids, weights)

def test_right():
    torch.testing.assert_close(call(), torch.full((3, 4), 0.75 * 3 * torch.nn.functional.silu(torch.tensor(4.0)) * 4))

def test_refused():
    call(rows=2)

def test_private():
    compute_routing_metadata(torch.zeros(1, 1), 1)

def test_wrong():
    assert 0, "wrong"
"""


def test_our_experts_are_under_ligers_name(tmp_path: Path) -> None:
    theirs, counts = tmp_path / "test_theirs.py", tmp_path / "counts.json"
    theirs.write_text(THEIRS)
    for name in ("__init__", "ops/__init__", "ops/fused_moe", "transformers/__init__", "transformers/swiglu"):
        path = tmp_path / "liger_kernel" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("def compute_routing_metadata(): ...\n" if name.endswith("moe") else "")
    options = ["-p", "expert_tests", "-c", os.devnull, "-p", "no:cacheprovider", "--counts", str(counts), str(theirs)]
    path = os.pathsep.join((str(TOOLS), str(tmp_path), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert counts.exists(), done.stdout + done.stderr
    found = json.loads(counts.read_text())
    assert found["counts"] == {"passed": 1, "skipped": 0, "xfailed": 0, "not served": 2, "failed": 1}
    assert [line for _, line in found["failures"]] == ["AssertionError: wrong"]
