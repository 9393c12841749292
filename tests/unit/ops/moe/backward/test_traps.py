"""What backwards of experts of others got wrong, by PyTorch's operators, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.unit.interpreter import Interpreter
from tests.unit.ops.moe.backward import traps

from flashmoe_science.operations import operation

KERNELS = (None, *(kernel.name for kernel in operation("moe_backward").ours()))


@pytest.mark.parametrize("trap", traps.TRAPS, ids=traps.NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pytorchs_operators_are_right(trap: traps.Trap, dtype: torch.dtype) -> None:
    assert traps.complaints(trap, traps.Place(dtype=dtype)) == []


@pytest.mark.parametrize("trap", traps.NAMES)
def test_the_kernels_are_right_in_tritons_interpreter(trap: str, interpreted: Interpreter) -> None:
    assert interpreted("ops/moe/backward/traps.py", trap) == []


@pytest.mark.gpu
@pytest.mark.parametrize("trap", traps.TRAPS, ids=traps.NAMES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernels_are_right_on_a_gpu(trap: traps.Trap, kernel: str | None) -> None:
    dtype = torch.bfloat16 if kernel == "moe_bwd_gluon_sm90" else torch.float32
    assert traps.complaints(trap, traps.Place("cuda", kernel, dtype)) == []
