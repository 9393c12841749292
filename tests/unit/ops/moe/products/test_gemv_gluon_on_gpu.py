"""moe_gemv_gluon on a GPU: every case with every config, results that repeat, layers of models."""

from __future__ import annotations

import pytest
import torch
from tests.unit.ops.moe.cases import Case, inputs_of, repeated
from tests.unit.ops.moe.products.format_cases import on
from tests.unit.ops.moe.products.gemv_cases import every, faults

from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops.moe.call import MoEInputs
from flashmoe_science.ops.moe.products.gemv_gluon.kernel import KERNEL

pytestmark = pytest.mark.gpu
LARGER = (
    "moe t{} e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved",
    "moe t{} e128 k8 d2048 f768 bf16 w:fp8_block",
    "moe t{} e128 k8 d2048 f768 bf16 w:int4_g128",
    "moe t{} e128 k8 d2048 f768 bf16 w:fp8_channel",
    "moe t{} e16 k8 d7168 f2048 bf16 w:fp8_block",
)


def hold(inputs: MoEInputs) -> None:
    gpu = current_gpu(torch.device("cuda"))
    for config in KERNEL.configs(inputs.problem, gpu):
        try:
            out = repeated(KERNEL, inputs, config)
        except CannotServe:
            return
        assert faults(inputs, out) == [], config


def test_every_case_is_right_and_repeats() -> None:
    """Made one after another: some are tensors of tens of gigabytes, of which little is written."""
    gpu = current_gpu(torch.device("cuda"))
    served = 0
    for name, inputs in every():
        if KERNEL.cannot(inputs.problem, gpu) is None:
            print(name)  # pytest shows the last one of a failure
            hold(on(inputs, "cuda"))
            served += 1
    assert served > 50


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
@pytest.mark.parametrize("text", LARGER)
def test_a_layer_is_right_and_repeats(text: str, tokens: int) -> None:
    inputs = inputs_of(Case(text.format(tokens), routing="foreign" if tokens == 5 else "random"), "cuda")
    if reason := KERNEL.cannot(inputs.problem, current_gpu(torch.device("cuda"))):
        pytest.skip(reason)
    hold(inputs)
