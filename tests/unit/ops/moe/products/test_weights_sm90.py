"""What moe_mxfp4_gluon_sm90 and moe_weights_gluon_sm90 compute, on the CPU, and what they refuse in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.interpreter import Interpreter
from tests.unit.ops.moe.cases import changed
from tests.unit.ops.moe.products.weights_cases import CASES, Case, inputs_of

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.kernel import CannotServe
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.moe.products.weights_sm90.kernel import KERNEL, OF_OTHERS, configs, plan

GPU = GPUS["h200"]
GPT_OSS = "moe t{} e32 k4 d2880 f2880 bf16 w:mxfp4 bias clamped interleaved"


@pytest.mark.slow  # its source is run by Python: no PyTorch or Triton changes it
@pytest.mark.parametrize("tiles", ["in turns", pytest.param("both", marks=pytest.mark.redundant)])
def test_every_case_is_right_on_the_cpu(interpreted: Interpreter, tiles: str) -> None:
    found = interpreted("ops/moe/products/weights_cases.py", tiles)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert set(map(str, CASES)) < set(found)


@pytest.mark.parametrize(
    ("text", "gpu", "words"),
    [
        (GPT_OSS.format(1), None, "need a GPU"),
        (GPT_OSS.format(1), GPUS["b200"], "compute capability 9.0"),
        ("moe t1 e4 k2 d64 f64 bf16", GPU, "its weights are mxfp4, and the problem's bf16"),
        ("moe t1 e4 k2 d128 f128 bf16 w:fp8_block", GPU, "the problem's fp8_block"),
        ("moe t1 e4 k2 d64 f64 fp16 w:mxfp4", GPU, "serves bf16, not fp16"),
        ("moe t1 e4 k2 d64 f64 bf16 w:mxfp4 ungated", GPU, "not gated"),
    ],
)
def test_problems_that_mxfp4_s_does_not_serve(text: str, gpu: Any, words: str) -> None:
    assert words in str(KERNEL.cannot(parse_problem(text), gpu))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GPT_OSS.format(1), "its weights are fp8_block or fp8_channel or int4_g32 or int4_g128"),
        ("moe t1 e4 k2 d128 f128 bf16 w:fp8_block_w8a8", "the problem's fp8_block_w8a8"),
        ("moe t1 e4 k2 d136 f128 bf16 w:fp8_block", "dim is 136; its copies of fp8 need a multiple of 16"),
        ("moe t1 e4 k2 d128 f128 fp16 w:int4_g32", "serves bf16, not fp16"),
    ],
)
def test_problems_that_that_of_other_formats_does_not_serve(text: str, words: str) -> None:
    assert words in str(OF_OTHERS.cannot(parse_problem(text), GPU))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w1": torch.zeros(4 * 64 * 32 + 2, dtype=torch.uint8)[2:].view(4, 64, 32)}, "w1 does not start"),
        ({"w2": torch.zeros(4, 64, 24, dtype=torch.uint8)[..., :16]}, "w2 has stride 24 in dimension 1"),
        ({"w1": torch.zeros(4, 80, 32, dtype=torch.uint8)[:, :64]}, "w1 has stride 2560 in dimension 0; .* multiple of 1024"),
    ],
)
def test_tensors_that_it_leaves_to_the_portable_kernel(change: dict[str, Any], words: str) -> None:
    served = inputs_of(Case("moe t5 e4 k2 d64 f32 bf16 w:mxfp4"))
    with pytest.raises(CannotServe, match=words):
        plan(changed(served, **change), configs(served.problem, GPU)[0])


@pytest.mark.parametrize(("tokens", "tile"), [(1, 8), (4, 8), (16, 8), (64, 16), (256, 64), (1024, 128), (4096, 128)])
def test_a_tile_has_as_many_tokens_as_most_experts(tokens: int, tile: int) -> None:
    problem = parse_problem(GPT_OSS.format(tokens))
    assert configs(problem, GPU)[0]["block_m"] == tile
