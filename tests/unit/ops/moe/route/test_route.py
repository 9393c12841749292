"""The router: the kernel in Triton's interpreter and PyTorch's operators against the fp64 reference, the operator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.interpreter import Interpreter
from tests.unit.ops.moe.route.cases import CASES, INTERPRETED, MOST_CHOICES, NOT_FOR_KERNEL, Case, examine, reference
from torch.autograd import forward_ad

from flashmoe_science.ops.moe.route.losses import balance_loss, expert_load
from flashmoe_science.ops.moe.route.route import route, route_by_pytorch
from flashmoe_science.ops.moe.route.spec import Options

DEEPSEEK: dict[str, Any] = {"scoring": "sigmoid", "normalize": "sum", "groups": 8, "top_k_groups": 4, "scaling_factor": 2.5}


def test_the_kernel_is_right_in_tritons_interpreter(interpreted: Interpreter) -> None:
    """One test, as the script takes a while and each of pytest's workers would run it anew."""
    found = interpreted("ops/moe/route/cases.py")
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert found.keys() == set(map(str, INTERPRETED))


@pytest.mark.parametrize("case", [*CASES, *NOT_FOR_KERNEL], ids=str)
def test_pytorchs_operators_are_right(case: Case) -> None:
    assert examine(case, route_by_pytorch) == []


def test_the_cases_cover_what_a_router_meets() -> None:
    assert len({str(case) for case in CASES}) == len(CASES)
    sizes = {(case.experts, case.spec.top_k, case.spec.scoring) for case in CASES}
    for experts in (1, 7, 60, 128, 384, 2048):
        assert {(experts, top_k) for top_k in (1, min(8, experts), min(experts, MOST_CHOICES))} <= {size[:2] for size in sizes}
    assert {case.dtype for case in CASES} == {torch.float32, torch.bfloat16, torch.float16}
    assert {(case.spec.scoring, case.spec.normalize) for case in CASES} == {
        (scoring, normalize) for scoring in ("softmax", "softmax_topk", "sigmoid") for normalize in ("none", "sum")
    }


# Choices that the reference and an implementation could get wrong together ----------------------------------------------------


@pytest.mark.parametrize("scoring", ["softmax", "softmax_topk", "sigmoid"])
def test_the_choice_is_by_logit_where_rounded_scores_are_equal(scoring: Any) -> None:
    next_up = torch.nextafter(torch.tensor(20.0), torch.tensor(30.0)).item()
    logits = torch.tensor([[20.0, next_up, 19.0], [-300.0, -200.0, 0.0], [-0.0, 0.0, -1.0]])
    assert route(logits, 3, scoring=scoring)[1].tolist() == [[1, 0, 2], [2, 1, 0], [0, 1, 2]]


def test_infinite_logits_and_nan_come_last_and_no_expert_twice() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[nan, -inf, 1.0, -inf, nan, 2.0], [nan] * 6, [-inf] * 6, [nan, -inf, inf, -nan, -1.0, -inf]])
    weights, ids = route(logits, 6, scoring="softmax_topk")
    assert ids.tolist() == [[5, 2, 1, 3, 0, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [2, 4, 1, 5, 0, 3]]
    weights, ids = route(logits[:1], 3, scoring="softmax_topk")
    assert ids.tolist() == [[5, 2, 1]]
    assert weights[0, 2] == 0.0
    torch.testing.assert_close(weights[0, :2], torch.softmax(torch.tensor([2.0, 1.0]), 0))


def test_a_bias_changes_the_choice_and_not_the_weight() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    weights, ids = route(logits, 2, scoring="sigmoid", selection_bias=bias)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[-1.0, 2.0]])))
    weights, _ = route(logits, 2, scoring="sigmoid", selection_bias=bias, normalize="sum", scaling_factor=2.5)
    torch.testing.assert_close(weights.sum(-1), torch.tensor([2.5]))


def test_a_group_is_as_good_as_its_two_best() -> None:
    """The best expert is in a group that is out, as its companions are the worst."""
    scores = torch.tensor([[0.95, 0.05, 0.05, 0.05, 0.6, 0.6, 0.1, 0.1, 0.7, 0.4, 0.1, 0.1]])
    logits = torch.logit(scores)
    weights, ids = route(logits, 3, scoring="sigmoid", groups=3, top_k_groups=1)
    assert ids.tolist() == [[4, 5, 6]]
    torch.testing.assert_close(weights, torch.tensor([[0.6, 0.6, 0.1]]))
    assert route(logits, 3, scoring="sigmoid", groups=3, top_k_groups=2)[1].tolist() == [[8, 4, 5]]
    alone = route(logits, 3, scoring="sigmoid", groups=1, top_k_groups=1)  # as DeepSeek's config says it of no groups
    assert torch.equal(alone[1], route(logits, 3, scoring="sigmoid")[1])
    even = torch.zeros(1, 12)
    assert route(even, 5, scoring="sigmoid", groups=3, top_k_groups=2)[1].tolist() == [[0, 1, 2, 3, 4]]


def test_any_leading_dimensions() -> None:
    logits = torch.randn(2, 3, 4, 16)
    weights, ids = route(logits, 5)
    flat_weights, flat_ids = route(logits.view(24, 16), 5)
    assert torch.equal(weights, flat_weights.view(2, 3, 4, 5))
    assert torch.equal(ids, flat_ids.view(2, 3, 4, 5))
    for leading in ((), (0,), (3, 0, 2)):
        weights, ids = route(torch.randn(*leading, 16), 5)
        assert weights.shape == ids.shape == (*leading, 5)
        assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    transposed = logits.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    got = route(transposed, 5)
    assert torch.equal(got[1], route(logits, 5)[1])
    assert got[0].is_contiguous()
    assert got[1].is_contiguous()


# Gradients and transforms -----------------------------------------------------------------------------------------------------

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"normalize": "sum", "scaling_factor": -1.5},
    {"scoring": "softmax_topk"},
    {"scoring": "sigmoid", "groups": 4, "top_k_groups": 2},
    {"scoring": "sigmoid", "normalize": "sum", "selection_bias": torch.linspace(-1, 1, 16)},
)


@pytest.mark.parametrize("way", WAYS)
def test_the_weights_have_the_gradient_of_the_formula(way: dict[str, Any]) -> None:
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights, ids = route(logits, 4, **way)
    assert not ids.requires_grad
    factors = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((weights * factors).sum(), logits)

    exact = logits.detach().double().requires_grad_()
    index = ids.long()
    scoring = way.get("scoring", "softmax")
    scores = {"softmax": exact.softmax(-1), "softmax_topk": exact, "sigmoid": exact.sigmoid()}[scoring].gather(-1, index)
    if scoring == "softmax_topk":
        scores = scores.softmax(-1)
    if way.get("normalize") == "sum":
        scores = scores / scores.sum(-1, keepdim=True)
    (right,) = torch.autograd.grad((scores * way.get("scaling_factor", 1.0) * factors).sum(), exact)
    torch.testing.assert_close(gradient.double(), right, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        assert not route(logits, 4, **way)[0].requires_grad


def test_forward_derivatives_and_transforms_reach_the_weights() -> None:
    logits, tangent = torch.randn(3, 8), torch.randn(3, 8)
    with forward_ad.dual_level():
        weights, _ = route(forward_ad.make_dual(logits, tangent), 2)
        assert forward_ad.unpack_dual(weights).tangent is not None
    mapped = torch.func.vmap(lambda one: route(one, 2)[0])(logits)
    torch.testing.assert_close(mapped, route(logits, 2)[0])
    gradient = torch.func.grad(lambda one: route(one, 2)[0][:, 0].sum())(logits)
    assert gradient.abs().sum() > 0


# The operator -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
def test_it_compiles_as_one_graph(requires_grad: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    bias = torch.randn(256, requires_grad=True)  # as a model's parameter is; nothing flows to it

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = route(2 * x, 8, selection_bias=bias, **DEEPSEEK)
        return weights + 1, ids

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (5, 9):
        x = torch.randn(tokens, 256, requires_grad=requires_grad)
        for got, right in zip(compiled(x), layer(x), strict=True):
            torch.testing.assert_close(got, right)
            assert got.requires_grad == right.requires_grad == (requires_grad and got.dtype == torch.float32)
    assert len(graphs) == 1
    assert "flashmoe.moe_route" in graphs[0].code
    torch._dynamo.reset()


def test_the_operator_is_as_pytorch_wants_it() -> None:
    operator = torch.ops.flashmoe.moe_route.default
    logits, bias = torch.randn(4, 32), torch.randn(32)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, (logits, bias, 4, "sigmoid", "sum", 4, 2, 2.5), test_utils=tests)
    torch.library.opcheck(operator, (logits[:, :30].T, None, 4, "softmax", "none", 1, 1, 1.0), test_utils=tests)


def test_modes_see_the_operator() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        weights, ids = route(torch.empty(3, 5, 64, dtype=torch.bfloat16), 8)
    assert weights.shape == ids.shape == (3, 5, 8)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


# The load of the experts ------------------------------------------------------------------------------------------------------


def test_the_balance_loss_is_that_of_transformers() -> None:
    logits = torch.randn(40, 8, requires_grad=True)
    ids = route(logits, 3)[1]
    probabilities = logits.softmax(-1)
    mask = torch.nn.functional.one_hot(probabilities.topk(3).indices, 8).float()
    right = (mask.mean(0) * probabilities.mean(0)).sum() * 8
    loss = balance_loss(logits, ids)
    torch.testing.assert_close(loss, right)
    for got, expected in zip(torch.autograd.grad(loss, logits), torch.autograd.grad(right, logits), strict=True):
        torch.testing.assert_close(got, expected)
    assert balance_loss(logits.view(4, 10, 8), ids.view(4, 10, 3)) == loss
    torch.testing.assert_close(balance_loss(torch.zeros(8, 4), torch.arange(16).view(8, 2) % 4), torch.tensor(2.0))
    assert balance_loss(logits[:0], ids[:0]) == 0.0


def test_the_load_counts_no_id_that_is_no_expert() -> None:
    ids = torch.tensor([[0, 3, 3], [-1, 4, 3], [2**30, 2, -(2**31)]], dtype=torch.int32)
    load = expert_load(ids, 4)
    assert load.dtype == torch.int32
    assert load.tolist() == [1, 0, 1, 3]
    assert expert_load(ids[:0], 4).tolist() == [0, 0, 0, 0]
    assert expert_load(torch.tensor([2**40, 1]), 2).tolist() == [0, 1]


def test_the_reference_is_torch_topk_where_nothing_is_equal() -> None:
    logits = torch.randn(20, 60, generator=torch.Generator().manual_seed(3))
    weights, ids = reference(logits, None, Options(8, "softmax", "sum"))
    right = logits.double().softmax(-1).topk(8)
    assert ids == right.indices.tolist()
    torch.testing.assert_close(weights, right.values / right.values.sum(-1, keepdim=True))
