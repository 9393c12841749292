"""The backward of a mixture of experts in Triton's interpreter: every case against autograd in fp64, in poisoned memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.interpreter import Interpreter
from tests.unit.ops.moe.backward.cases import CASES, KERNELS

PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_is_right_with_every_kernel_that_can_be_interpreted(part: int, interpreted: Interpreter) -> None:
    found = interpreted("ops/moe/backward/cases.py", str(part), str(PARTS))
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    del found["what is kept"]
    assert {name.rpartition(": ")[0] for name in found} == set(map(str, CASES[part::PARTS]))
    assert {name.rpartition(": ")[2] for name in found} == {kernel.name for kernel in KERNELS if kernel.interpretable}


def test_the_gluon_kernels_are_right_on_the_cpu() -> None:
    """In a process of its own, where stand-ins are in place of Gluon."""
    script, root = Path(__file__).with_name("gluon_cases.py"), Path(__file__).parents[5]
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    ran = subprocess.run([sys.executable, "-W", "ignore", script], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) == 8
