"""The router's gradient, by every scoring, and its losses, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.interpreter import Interpreter

from flashmoe_science.ops.moe.route.losses import balance_loss, expert_load, z_loss
from flashmoe_science.ops.moe.route.route import route, route_by_pytorch, route_with_losses
from flashmoe_science.ops.moe.route.spec import Options

GRADIENTS = {
    "mixtral": {"normalize": "sum"},
    "olmoe": {"scaling_factor": 1.5},
    "gpt-oss": {"scoring": "softmax_topk"},
    "sigmoid": {"scoring": "sigmoid"},
    "deepseek-v3": {"scoring": "sigmoid", "normalize": "sum", "groups": 2, "top_k_groups": 1, "scaling_factor": 2.5},
}


@pytest.mark.parametrize("way", GRADIENTS)
def test_the_gradient_is_that_of_the_chosen_weights(way: str) -> None:
    options: dict[str, Any] = GRADIENTS[way]
    logits = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: route(x, 3, **options)[0], (logits,))
    weights, ids = route(logits, 3, **options)
    assert not ids.requires_grad
    into = torch.randn_like(weights)
    (got,) = torch.autograd.grad(weights, logits, into)
    by_pytorch = route_by_pytorch(logits, None, Options(3, **options))[0]
    torch.testing.assert_close(got, torch.autograd.grad(by_pytorch, logits, into)[0])
    half = logits.detach().bfloat16().requires_grad_()
    (of_half,) = torch.autograd.grad(route(half, 3, **options)[0], half, into.float())
    wide = half.detach().float().requires_grad_()
    (of_wide,) = torch.autograd.grad(route(wide, 3, **options)[0], wide, into.float())
    assert torch.equal(of_half, of_wide.bfloat16())  # computed in fp32 and rounded once


def test_a_selection_bias_has_no_gradient_and_a_second_derivative_is_refused() -> None:
    logits, bias = torch.randn(5, 8, requires_grad=True), torch.zeros(8, requires_grad=True)
    weights, _ = route(logits, 2, scoring="sigmoid", selection_bias=bias)
    of_logits, of_bias = torch.autograd.grad(weights.sum(), (logits, bias), create_graph=True, allow_unused=True)
    assert of_bias is None
    with pytest.raises(NotImplementedError, match="moe_route_backward are asked for, which has none"):
        of_logits.sum().backward()


def test_between_the_passes_logits_and_ids_are_kept() -> None:
    logits, kept = torch.randn(5, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape) or one, lambda one: one):
        route(logits, 2, normalize="sum")
    assert kept == [(5, 8), (5, 2)]


@pytest.mark.filterwarnings("ignore")
def test_opcheck_of_the_gradient() -> None:
    logits = torch.randn(5, 8)
    weights, ids = route(logits, 2)
    arguments = (torch.randn_like(weights), logits, ids, 2, "softmax", "none", 1, 1, 1.0)
    torch.library.opcheck(
        torch.ops.flashmoe.moe_route_backward.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    for requires_grad in (False, True):
        given = (logits.clone().requires_grad_(requires_grad), None, 2, "softmax", "sum", 1, 1, 1.0)
        torch.library.opcheck(torch.ops.flashmoe.moe_route.default, given)
        torch.library.opcheck(torch.ops.flashmoe.moe_route_with_losses.default, given)


def test_the_losses_have_the_gradients_of_their_formulas() -> None:
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    ids = logits.topk(2).indices
    for loss in (z_loss, lambda x: balance_loss(x, ids)):
        assert torch.autograd.gradcheck(loss, (logits,))
    p, lse = logits.softmax(-1), logits.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(z_loss(logits), lse.square().mean())
    torch.testing.assert_close(torch.autograd.grad(z_loss(logits), logits)[0], 2 * lse * p / 6)
    load = expert_load(ids, 4) / 6
    of_p = 4 * load / 6
    right = p * (of_p - (p * of_p).sum(-1, keepdim=True))
    torch.testing.assert_close(torch.autograd.grad(balance_loss(logits, ids), logits)[0], right)
    assert z_loss(logits[:0]) == 0.0
    half = logits.detach().bfloat16()
    assert z_loss(half).dtype == torch.float32
    assert z_loss(half) == z_loss(half.float())


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("skew", [0.0, 4.0])
def test_the_losses_are_the_formulas_of_switch_and_st_moe(top_k: int, skew: float) -> None:
    """Term by term, in fp64 (Switch Transformers, equations 4 to 6; ST-MoE, equation 5)."""
    experts, tokens = 4, 6
    logits = torch.randn(tokens, experts) + skew * torch.eye(experts)[0]
    ids = route(logits, top_k)[1]
    rows = [[math.exp(one) for one in row] for row in logits.double().tolist()]
    balance = 0.0
    for expert in range(experts):
        fraction = sum(row.count(expert) for row in ids.tolist()) / tokens
        probability = sum(row[expert] / sum(row) for row in rows) / tokens
        balance += experts * fraction * probability
    z = sum(math.log(sum(row)) ** 2 for row in rows) / tokens
    for loss, right in ((balance_loss(logits, ids), balance), (z_loss(logits), z)):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(right, rel=1e-6)
    half = logits.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert balance_loss(half, ids) == balance_loss(half.float(), ids)
        assert z_loss(half) == z_loss(half.float())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float32, torch.float64])
def test_the_balance_loss_does_not_depend_on_the_default_dtype(default: torch.dtype) -> None:
    logits = torch.randn(1001, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = logits.topk(3)[1]
    right = 8 * (ids.flatten().bincount().double() * logits.softmax(-1).sum(0)).sum() / 1001**2
    torch.set_default_dtype(default)
    try:
        wide, narrow = balance_loss(logits, ids), balance_loss(logits.float(), ids)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
    assert wide.item() == pytest.approx(right.item(), rel=1e-13)
    assert narrow.item() == pytest.approx(right.item(), rel=1e-6)


@pytest.mark.parametrize("way", GRADIENTS)
def test_the_losses_gradients_are_added_to_the_routers(way: str) -> None:
    logits = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    options = Options(3, **GRADIENTS[way])
    for results in (slice(0, 1), slice(2, 4)):  # the weights, and both losses
        assert torch.autograd.gradcheck(lambda x, of=results: route_with_losses(x, None, *options)[of], (logits,))
    weights, ids, *losses = route_with_losses(logits, None, *options)
    right = [route_by_pytorch(logits, None, options)[0], balance_loss(logits, ids), z_loss(logits)]
    torch.testing.assert_close([weights, *losses], right)
    for chosen in ([1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.5, 0.3, -0.2]):
        got, wanted = (
            torch.autograd.grad(sum(c * one.sum() for c, one in zip(chosen, of, strict=True)), logits, retain_graph=True)[0]
            for of in ((weights, *losses), right)
        )
        torch.testing.assert_close(got, wanted)


def test_a_router_with_losses_keeps_logits_ids_and_load_and_takes_no_token() -> None:
    logits, kept = torch.randn(5, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape) or one, lambda one: one):
        route_with_losses(logits, None, *Options(2))
    assert kept == [(5, 8), (5, 2), (8,)]
    _, ids, *losses = route_with_losses(logits[:0], None, *Options(2))
    assert ids.shape == (0, 2)
    assert losses == [0.0, 0.0]


def test_the_kernel_is_right_in_tritons_interpreter(interpreted: Interpreter) -> None:
    found = interpreted("ops/moe/route/gradients.py")
    assert len(found) == 54
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
