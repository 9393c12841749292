"""The backward of a mixture of experts in Triton's interpreter: every case against autograd in fp64, in poisoned memory."""

from __future__ import annotations

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


@pytest.mark.slow  # its source is run by Python: no PyTorch or Triton changes it
def test_the_gluon_kernels_are_right_on_the_cpu(interpreted: Interpreter) -> None:
    found = interpreted("ops/moe/backward/gluon_cases.py")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) == 8
