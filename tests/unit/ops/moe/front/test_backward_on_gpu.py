"""Experts that are trained on a GPU: gradients by PyTorch's operators and by each kernel of ours, in graphs, without a wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashmoe_science as fm
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import CannotServe
from flashmoe_science.operations import operation, parse_problem

pytestmark = pytest.mark.gpu

BACKWARD = operation("moe_backward")
KERNELS = ("grouped_mm_bwd", *(kernel.name for kernel in BACKWARD.ours()))
PROBLEMS = (
    "moebwd t300 e8 k2 d256 f128 bf16",
    "moebwd t1024 e32 k4 d512 f256 fp16",
    "moebwd t200 e8 k2 d256 f128 fp32",
    "moebwd t300 e8 k2 d256 f128 bf16 bias clamped interleaved transposed",
    "moebwd t513 e64 k8 d136 f72 bf16 bias relu2 ungated",
)
SIZES = "moebwd t512 e8 k2 d256 f128 bf16"


def inputs_of(text: str) -> tuple[Any, dict[str, torch.Tensor]]:
    problem = parse_problem(text)
    generator = torch.Generator("cuda").manual_seed(0)
    return problem, BACKWARD.contract().inputs(problem, torch.device("cuda"), generator)


def loss(inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    x, w1, w2, weights, ids, *biases = (one for name, one in inputs.items() if name != "dout")
    names = dict(zip(("gate_up_bias", "down_bias"), biases, strict=False))
    return (fm.fused_moe(x, w1, w2, weights, ids, **names, **options) * inputs["dout"]).sum()


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_pass_the_contract(text: str, kernel: str, recompute: bool) -> None:
    problem, inputs = inputs_of(text)
    contract = BACKWARD.contract()
    try:
        got = contract.call(lambda *a, **b: fm.fused_moe(*a, kernel=kernel, recompute=recompute, **b), problem, inputs)
    except CannotServe as reason:
        pytest.skip(str(reason))
    right = contract.reference(problem, contract.widened(inputs))
    for one, exact, cap in zip(got, right, contract.cap(problem, inputs, right), strict=True):
        difference = (one.double() - exact).abs()
        assert difference.max() <= cap.max
        assert difference.square().mean().sqrt() <= cap.rms
    again = contract.call(lambda *a, **b: fm.fused_moe(*a, kernel=kernel, recompute=recompute, **b), problem, inputs)
    assert all(map(torch.equal, got, again))


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_waits_and_a_graph_replays_with_another_routing(kernel: str) -> None:
    problem, inputs = inputs_of(SIZES)
    chosen = next(one for one in BACKWARD.kernels() if one.name == kernel)
    if (reason := chosen.cannot(problem, gpu_of(inputs["x"]))) is not None:
        pytest.skip(reason)
    leaves = [one.requires_grad_() for name, one in inputs.items() if one.is_floating_point() and name != "dout"]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(loss(inputs, kernel=kernel), leaves)
    side.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(loss(inputs, kernel=kernel), leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(loss(inputs, kernel=kernel), leaves)
    inputs["topk_ids"].copy_(inputs["topk_ids"].flip(0))
    graph.replay()
    for got, right in zip(captured, torch.autograd.grad(loss(inputs, kernel=kernel), leaves), strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("one_memory", [False, True])
def test_gates_and_ups_that_are_two_tensors(kernel: str, one_memory: bool) -> None:
    _, inputs = inputs_of(SIZES)
    inputs["w1"].requires_grad_()
    right = torch.autograd.grad(loss(inputs, kernel=kernel), inputs["w1"])[0].chunk(2, 1)
    parts = [one.detach() if one_memory else one.detach().contiguous() for one in inputs["w1"].chunk(2, 1)]
    leaves = [one.requires_grad_() for one in parts]
    got = torch.autograd.grad(loss(inputs | {"w1": leaves}, kernel=kernel), leaves)  # type: ignore[dict-item]
    assert all(map(torch.equal, got, right))


@pytest.mark.parametrize("way", ["apart", "adapted"])
def test_neither_two_tensors_nor_adapters_wait_and_a_graph_replays_with_another_routing(way: str) -> None:
    _, inputs = inputs_of(SIZES)
    experts, rows, dim = inputs["w1"].shape
    options: dict[str, Any] = {}
    leaves = [inputs["x"].requires_grad_(), inputs["topk_weights"].requires_grad_()]
    if way == "apart":
        parts = [one.contiguous().requires_grad_() for one in inputs["w1"].chunk(2, 1)]
        leaves, inputs["w1"] = leaves + parts, parts  # type: ignore[assignment]
    else:
        low = [
            torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in ((experts, 16, dim), (experts, rows, 16))
        ]
        leaves, options["adapters"] = leaves + low, ((*low, 0.1), None)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(loss(inputs, **options), leaves)
    side.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(loss(inputs, **options), leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(loss(inputs, **options), leaves)
    inputs["topk_ids"].copy_(inputs["topk_ids"].flip(0))
    graph.replay()
    for got, right in zip(captured, torch.autograd.grad(loss(inputs, **options), leaves), strict=True):
        assert torch.equal(got, right)
