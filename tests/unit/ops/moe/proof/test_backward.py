"""The contract of the experts' backward: PyTorch's operators and the public functions pass it, and whole steps of training."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import flashmoe_science as fm
from flashmoe_science.measure.tolerance import check_output, expected
from flashmoe_science.operations import kernel_named, operation, parse_problem
from flashmoe_science.ops.moe.call import Activation, Tensors
from flashmoe_science.ops.moe.call.backward import our_kernel, run_of
from flashmoe_science.ops.moe.peers import sonicmoe
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem
from flashmoe_science.ops.moe.proof.backward.oracle import gradients_oracle, pre_activations
from flashmoe_science.ops.moe.proof.oracle import moe_oracle
from flashmoe_science.ops.moe.pytorch import pytorch_backward, saving_moe

CPU = torch.device("cpu")
CONTRACT = operation("moe_backward").contract()
# Routings of enough pairs that chance decides nothing: an exam allows for it.
FROM_IDS = (
    "moebwd t64 e8 k3 d32 f24 bf16",
    "moebwd t50 e7 k3 d24 f40 fp32 bias relu2 ungated",
    "moebwd t90 e4 k2 d32 f24 fp16 bias clamped interleaved transposed",
)
FROM_LOGITS = ("moebwd t64 e8 k3 d32 f24 bf16 logits", "moebwd t90 e16 k2 d16 f24 fp32 zipf bias")
# Of our own: PyTorch's operators behind the interface that kernels have.
PLANNED = our_kernel(
    name="moe_bwd_triton",
    about="",
    supports=lambda problem, device: None,
    configs=lambda problem, device: (),
    run=run_of(lambda inputs, config: _bind),
    launches=lambda problem, config, gpu: (),
    plan=lambda inputs, config: _bind,
)


def _bind(like: Any) -> Any:
    return lambda tensors, sums: pytorch_backward(tensors, like.activation, like.wanted)


def by_public_functions(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *routing: Any, **options: Any) -> torch.Tensor:
    if isinstance(routing[1], int):
        routing = fm.route(*routing, normalize="sum")
    return fm.fused_moe(x, w1, w2, *routing, **options)


def test_the_cap_of_one_routing_gradient_is_that_of_its_terms() -> None:
    """Its terms cancel by chance, in one seed of ten to a tenth of their norm, and what they are off by does not."""
    problem = parse_problem("moebwd t1 e1 k1 d128 f160 fp32 transposed")
    for seed in range(60):
        inputs = CONTRACT.inputs(problem, CPU, torch.Generator().manual_seed(seed))
        right = CONTRACT.reference(problem, CONTRACT.widened(inputs))
        cap = CONTRACT.cap(problem, inputs, right)[3]
        assert (CONTRACT.call(by_public_functions, problem, inputs)[3] - right[3]).abs().max() <= cap.max, seed
        assert cap.max < 1e-4


@pytest.mark.parametrize("text", [*FROM_IDS, *FROM_LOGITS])
@pytest.mark.parametrize("distribution", CONTRACT.distributions)
def test_gradients_of_each_implementation_pass(text: str, distribution: str) -> None:
    problem = parse_problem(text)
    inputs = CONTRACT.vary(distribution, CONTRACT.inputs(problem, CPU, torch.Generator().manual_seed(1)))
    right = CONTRACT.reference(problem, CONTRACT.widened(inputs))
    bounds = expected(right, CONTRACT.plain(problem, inputs), CONTRACT.cap(problem, inputs, right))
    found = {"public": CONTRACT.call(by_public_functions, problem, inputs)}
    for kernel in (*operation("moe_backward").peers(), PLANNED):
        if kernel.supports(problem, None) is None:
            given = CONTRACT.for_kernel(problem, inputs)
            found[kernel.name] = CONTRACT.from_kernel(CONTRACT.planned(kernel, None, given)(given))
    assert found.keys() >= {"public", "moe_bwd_triton", "grouped_mm_bwd"}
    assert ("grouped_mm_train" in found) == (problem.routing != "ids")
    for name, results in found.items():
        reasons = [why for got, one in zip(results, bounds, strict=True) for why in check_output(name, got, one)[1]]
        assert reasons == []


@pytest.mark.parametrize(
    "text", ["moebwd t1 e3 k1 d64 f64 bf16", "moebwd t1 e1 k1 d64 f8 fp32", "moebwd t1 e8 k2 d64 f48 bf16 logits"]
)
def test_the_cap_holds_a_gradient_of_one_weight_whose_terms_cancel(text: str) -> None:
    """Of 150 calls of one token the cap on it, sixteen roundings of what is left, condemned seven that were right."""
    problem = parse_problem(text)
    for seed in range(150):
        inputs = CONTRACT.inputs(problem, CPU, torch.Generator().manual_seed(seed))
        right = CONTRACT.reference(problem, CONTRACT.widened(inputs))
        got, cap = CONTRACT.call(by_public_functions, problem, inputs)[3], CONTRACT.cap(problem, inputs, right)[3]
        assert (got.double() - right[3]).abs().max() <= cap.max + 2.0**-120, seed


def test_the_oracle_is_autograd_of_the_forwards() -> None:
    problem = parse_problem("moebwd t9 e4 k2 d8 f6 fp32 bias clamped interleaved")
    inputs = CONTRACT.widened(CONTRACT.inputs(problem, CPU, torch.Generator().manual_seed(1)))
    given = {name: one.double() if one.is_floating_point() else one for name, one in inputs.items()}
    leaves = [one.requires_grad_() for name, one in given.items() if one.is_floating_point() and name != "dout"]
    activation, dout = Activation("clamped_silu", True, True), given.pop("dout")
    right = torch.autograd.grad(moe_oracle(Tensors(**given), activation), leaves, dout)
    for got, one in zip(gradients_oracle(Tensors(**given), activation, dout), right, strict=True):
        torch.testing.assert_close(got, one)


def test_the_pre_activations_have_the_rows_of_a_forward_that_saves_them() -> None:
    problem = parse_problem("moebwd t9 e4 k2 d8 f6 fp32 bias")
    inputs = CONTRACT.variant("ids of -1 (no expert)").inputs(problem, CPU, torch.Generator().manual_seed(1))
    tensors = Tensors(**{name: one for name, one in inputs.items() if name != "dout"})
    z, here = pre_activations(tensors), int((tensors.topk_ids >= 0).sum())
    assert 0 < here < problem.pairs()
    assert z[here:].isnan().all()
    torch.testing.assert_close(z[:here], saving_moe(tensors, Activation())[1][:here])


def test_a_step_has_the_forwards_products_too() -> None:
    alone, step = (parse_problem(f"moebwd t64 e8 k3 d32 f24 bf16{word}") for word in ("", " logits"))
    assert isinstance(alone, MoEBackwardProblem)
    assert (alone.flops(), step.flops()) == (12 * 64 * 3 * 32 * 24, 18 * 64 * 3 * 32 * 24)
    of_weights, of_x = 3 * 8 * 32 * 24, 64 * 32
    assert alone.min_bytes() == 2 * (3 * of_x + 2 * of_weights + 64 * 3 * 48) + 64 * 3 * (8 + 4)
    assert step.min_bytes() == 2 * (4 * of_x + 2 * of_weights) + 2 * 64 * 8 * 4
    assert str(parse_problem(str(step))) == str(step)
    assert alone.distance(parse_problem("moe t64 e8 k3 d32 f24 bf16")) == float("inf")


def test_sonicmoe_is_a_rival_of_steps_only() -> None:
    peer = kernel_named("sonicmoe_train", "moe_backward")
    assert "needs a GPU" in peer.supports(parse_problem(FROM_LOGITS[0]), None)
    assert sonicmoe.KERNEL.slow == peer.slow


def test_a_process_that_knows_the_contract_alone_can_take_a_step() -> None:
    """The harness's workers import no function of the package; on a GPU a step was refused there for want of an operator."""
    source = (
        "import torch, flashmoe_science.ops.moe.proof.backward.contract\n"
        "torch.ops.flashmoe.moe_forward_saving, torch.ops.flashmoe.moe_route_backward"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
