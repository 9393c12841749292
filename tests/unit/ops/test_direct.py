"""Direct launches of the Triton that is here hand the driver what Triton's own Python hands it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon is not installed here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a library stands in for the driver's, which is here")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc makes a library that stands in for the driver's")
def test_the_driver_is_handed_the_same(tmp_path: Path) -> None:
    script = Path(__file__).with_name("handed_over.py")
    there = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "TRITON_LIBCUDA_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False, env=there)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {name: one["same"] for name, one in found.items()} == {
        "flashmoe_fwd_gluon_sm90": [True, True],
        "flashmoe_split_triton": [True, True],
        "flashmoe_merge_triton": [True, True],
    }
    assert found["flashmoe_fwd_gluon_sm90"]["maps"] == 4
    assert all(one["bytes"] > 100 for one in found.values())
