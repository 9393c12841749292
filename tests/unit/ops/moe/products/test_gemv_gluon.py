"""What moe_gemv_gluon computes, on the CPU, and what it refuses in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.interpreter import Interpreter
from tests.unit.ops.moe.cases import Case, changed, inputs_of

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.kernel import CannotServe
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.moe.products.gemv_gluon.kernel import KERNEL, plan

GPU = GPUS["h200"]


@pytest.mark.slow  # its source is run by Python: no PyTorch or Triton changes it
@pytest.mark.parametrize(("part", "least"), [("half", 40), pytest.param("whole", 80, marks=pytest.mark.redundant)])
def test_every_case_is_right_on_the_cpu(part: str, least: int, interpreted: Interpreter) -> None:
    found = interpreted("ops/moe/products/gemv_cases.py", part)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) > least


@pytest.mark.parametrize(
    ("text", "gpu", "words"),
    [
        ("moe t1 e4 k2 d64 f64 bf16 w:mxfp4", None, "need a GPU"),
        ("moe t1 e4 k2 d64 f64 bf16 w:mxfp4", GPUS["b200"], "8.0 to 9.0, not"),
        ("moe t1 e4 k2 d64 f64 bf16", GPU, "its weights are in a format, and the problem's bf16"),
        ("moe t9 e4 k2 d64 f64 bf16 w:mxfp4", GPU, "tokens is 9; it is for at most 8"),
        ("moe t1 e40 k20 d64 f64 bf16 w:mxfp4", GPU, "top_k is 20; it is for at most 16"),
        ("moe t1 e4 k2 d128 f128 fp16 w:fp8_block", GPU, "multiplied as bf16, and the problem is fp16"),
        ("moe t1 e4 k2 d129 f128 bf16 w:fp8_block", GPU, "dim is 129; codes are read in pairs"),
        ("moe t1 e4 k2 d128 f128 bf16 w:fp8_block_w8a8", GPUS["l4"], "is served on compute capability 9.0"),
        ("moe t1 e4 k2 d128 f128 bf16 w:fp8_block_w8a8 bias", GPU, "is served without biases"),
    ],
)
def test_problems_that_it_does_not_serve(text: str, gpu: Any, words: str) -> None:
    assert words in str(KERNEL.cannot(parse_problem(text), gpu))


def test_tensors_that_it_leaves_to_the_portable_kernel() -> None:
    inputs = inputs_of(Case("moe t1 e8 k2 d64 f96 bf16 w:int4_g32"), "cpu")
    scale = inputs.tensors.gate_up_scale
    assert scale is not None
    with pytest.raises(CannotServe, match="float32; it multiplies weights by those of"):
        plan(changed(inputs, gate_up_scale=scale.float()), KERNEL.configs(inputs.problem, GPU)[0])
    narrow = torch.zeros(8, 192, 9, dtype=torch.int32)[..., :8].view(torch.uint8)[..., 1:33]
    with pytest.raises(CannotServe, match="in pairs"):
        plan(changed(inputs, w1=narrow), KERNEL.configs(inputs.problem, GPU)[0])


@pytest.mark.parametrize(
    ("form", "gpu", "most"),
    [
        ("mxfp4", GPU, 1),
        ("fp8_block_w8a8", GPU, 2),
        ("fp8_block", GPU, 2),
        ("fp8_channel", GPU, 2),
        ("int4_g128", GPU, 8),
        ("int4_g128", GPUS["a100"], 0),
    ],
)
def test_it_is_the_guess_for_as_many_tokens_as_it_is_the_fastest_for(form: str, gpu: Any, most: int) -> None:
    several = [parse_problem(f"moe t{tokens} e128 k8 d2048 f768 bf16 w:{form}") for tokens in range(1, 9)]
    assert [KERNEL.suits(problem, gpu) for problem in several] == [problem.tokens <= most for problem in several]  # type: ignore[arg-type,attr-defined]


@pytest.mark.parametrize(("layer", "fits"), [("e128 k8 d2048 f768", True), ("e256 k8 d7168 f2048", False)])
def test_of_quantised_tokens_it_leaves_large_experts_to_hoppers_kernel(layer: str, fits: bool) -> None:
    """DeepSeek-V3's took 132 us by it, 102 by that."""
    assert KERNEL.suits(parse_problem(f"moe t1 {layer} bf16 w:fp8_block_w8a8"), GPU) is fits
