"""What moe_fp8_gluon_sm90 computes, on the CPU, and what it refuses in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.interpreter import Interpreter
from tests.unit.ops.moe.cases import changed
from tests.unit.ops.moe.products.fp8_cases import CASES, Between, Case, inputs_of, wrong_between
from tests.unit.ops.moe.proof.test_contract import wrong as wrong_by_contract

from flashmoe_science.contract import built_in
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.kernel import CannotServe
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.formats import SIDE, Weights, quantized_rows
from flashmoe_science.ops.moe.call import Tensors
from flashmoe_science.ops.moe.front.kernels import ours
from flashmoe_science.ops.moe.products.fp8_sm90.kernel import KERNEL, configs, plan

GPU = GPUS["h200"]
QWEN3 = "moe t{} e128 k8 d2048 f768 bf16 w:fp8_block_w8a8"


@pytest.mark.slow  # its source is run by Python: no PyTorch or Triton changes it
def test_every_case_is_right_on_the_cpu(interpreted: Interpreter) -> None:
    found = interpreted("ops/moe/products/fp8_cases.py")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert set(found) == set(map(str, CASES))


def _cut(sums: torch.Tensor) -> torch.Tensor:
    """The sums in the 14 bits that Hopper's fp8 instructions keep."""
    mantissa, exponent = torch.frexp(sums)
    return torch.ldexp((mantissa * 2**14).trunc(), exponent - 14)


def _product(rows: torch.Tensor, weights: Weights, two_levels: bool) -> torch.Tensor:
    """Rows times weights by instructions of 32, whose sums are of 128 columns, or else of all of them."""
    (row_codes, of_rows, _), (codes, scale, _) = quantized_rows(rows), weights
    total = torch.zeros(rows.shape[0], codes.shape[0])
    for block, (one, two) in enumerate(zip(row_codes.split(SIDE, 1), codes.split(SIDE, 1), strict=True)):
        by = of_rows[:, block, None] * scale[:, block].repeat_interleave(SIDE)
        sums = torch.zeros_like(total)
        for left, right in zip(one.float().split(32, 1), two.float().split(32, 1), strict=True):
            if two_levels:
                sums = _cut(sums + left @ right.T)
            else:
                total = _cut(total + by * (left @ right.T))
        total = total + by * sums
    return total


def _layer(tensors: Tensors, two_levels: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What is activated, and the second product, of a layer of one expert."""
    first, second = tensors.in_format() or ()
    gate, up = _product(tensors.x, first.of(0), two_levels).chunk(2, 1)
    active = torch.nn.functional.silu(gate) * up
    return active, _product(active, second.of(0), two_levels).bfloat16()


@pytest.mark.parametrize("two_levels", [True, False])
def test_sums_of_a_whole_depth_in_tensor_cores_are_found(two_levels: bool) -> None:
    """A mistake planted in the sums alone: DeepSeek-V3's depth of 7168, in the bounds of the cases."""
    inputs = inputs_of(Case("moe t8 e1 k1 d7168 f256 bf16 w:fp8_block_w8a8"))
    active, rows = _layer(inputs.tensors, two_levels)
    given = Between(torch.arange(8), [0, 8], quantized_rows(active), rows)
    assert (wrong_between(inputs, given) == []) is two_levels


@pytest.mark.parametrize("two_levels", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_sums_of_a_whole_depth_are_wrong_by_the_contract(seed: int, two_levels: bool) -> None:
    """And codes that differ from the reference's, beside rounding boundaries, are not."""
    problem = parse_problem("moe t4 e1 k1 d7168 f256 bf16 w:fp8_block_w8a8")
    contract = built_in("moe").variant("large products that cancel")
    inputs = contract.inputs(problem, torch.device("cpu"), torch.Generator().manual_seed(seed))
    tensors = Tensors(**inputs)
    _, rows = _layer(tensors, two_levels)
    assert (wrong_by_contract(problem, inputs, (tensors.topk_weights * rows).bfloat16()) == []) is two_levels


@pytest.mark.parametrize(
    ("text", "gpu", "words"),
    [
        (QWEN3.format(1), None, "need a GPU"),
        (QWEN3.format(1), GPUS["b200"], "compute capability 9.0"),
        ("moe t1 e4 k2 d64 f64 bf16", GPU, "its weights are multiplied by rows in e4m3, and the problem's are bf16"),
        ("moe t1 e4 k2 d128 f128 bf16 w:fp8_block", GPU, "the problem's are fp8_block"),
        ("moe t1 e4 k2 d128 f128 bf16 w:fp8_channel", GPU, "the problem's are fp8_channel"),
        ("moe t1 e4 k2 d64 f64 fp16 w:fp8_block_w8a8", GPU, "serves bf16, not fp16"),
        ("moe t1 e4 k2 d72 f64 bf16 w:fp8_block_w8a8", GPU, "dim is 72; the copy engine needs a multiple of 16"),
        ("moe t1 e4 k2 d64 f72 bf16 w:fp8_block_w8a8", GPU, "hidden is 72"),
        ("moe t9000000 e4 k4 d8192 f64 bf16 w:fp8_block_w8a8", GPU, "36000000 rows of 8192 columns"),
        ("moe t1 e4 k2 d64 f64 bf16 w:fp8_block_w8a8 ungated", GPU, "not gated"),
        ("moe t1 e4 k2 d64 f64 bf16 w:fp8_block_w8a8 interleaved", GPU, "gates and ups are interleaved"),
        ("moe t1 e4 k2 d64 f64 bf16 w:fp8_block_w8a8 bias", GPU, "there are biases"),
    ],
)
def test_problems_that_it_does_not_serve(text: str, gpu: Any, words: str) -> None:
    assert words in str(KERNEL.cannot(parse_problem(text), gpu))


def test_kernels_of_ours_that_compute_with_rows_in_e4m3() -> None:
    gemv, portable = "moe_gemv_gluon", "moe_grouped_triton"
    cases = ("fp8_block_w8a8", 8, {gemv}), ("fp8_block_w8a8", 9, set()), ("fp8_channel_w8a8", 1, {gemv})
    for form, tokens, others in (*cases, ("fp8_channel_static", 1, {gemv, portable})):
        problem = parse_problem(QWEN3.format(tokens).replace("fp8_block_w8a8", form))
        assert {one.name for one in ours() if one.cannot(problem, GPU) is None} == {KERNEL.name, *others}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"w1": torch.zeros(4 * 144 * 64 + 1, dtype=torch.uint8)[1:].view(torch.float8_e4m3fn).view(4, 144, 64)},
            "w1 does not",
        ),
        ({"w2": torch.zeros(4, 64, 88, dtype=torch.uint8)[..., :72].view(torch.float8_e4m3fn)}, "w2 has stride 88"),
        ({"gate_up_scale": torch.zeros(4, 3, 1)}, "hidden is 144 and a block of w1's scales has gates and ups"),
    ],
)
def test_tensors_that_it_refuses(change: dict[str, Any], words: str) -> None:
    served = inputs_of(Case("moe t5 e4 k2 d64 f144 bf16 w:fp8_block_w8a8"))
    with pytest.raises(CannotServe, match=words):
        plan(changed(served, **change), configs(served.problem, GPU)[0])


@pytest.mark.parametrize(("tokens", "tile"), [(1, 8), (16, 8), (64, 8), (256, 32), (1024, 64), (4096, 128)])
def test_a_tile_has_as_many_tokens_as_most_experts(tokens: int, tile: int) -> None:
    problem = parse_problem(QWEN3.format(tokens))
    assert configs(problem, GPU)[0]["block_m"] == tile
