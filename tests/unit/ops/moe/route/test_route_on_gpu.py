"""The router's kernel on a GPU: the cases of the interpreter and larger ones, no wait for the device, graphs, torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.ops.moe.route.cases import CASES, NOT_FOR_KERNEL, Case, examine, tensors_of
from tests.unit.ops.moe.route.gradients import CASES as GRADIENTS
from tests.unit.ops.moe.route.gradients import UNIT, wrong

from flashmoe_science.ops import calls, launch
from flashmoe_science.ops.moe.route import route as module
from flashmoe_science.ops.moe.route.losses import balance_loss, expert_load
from flashmoe_science.ops.moe.route.route import route, route_by_pytorch, route_with_losses
from flashmoe_science.ops.moe.route.spec import Options

pytestmark = pytest.mark.gpu

LARGE = (
    Case(128, Options(8, "softmax", "sum"), torch.bfloat16, tokens=4097),
    Case(256, Options(8, "sigmoid", "sum", 8, 4, 2.5), tokens=2050),
    Case(384, Options(8, "sigmoid", "sum"), tokens=1025),
    Case(1024, Options(8), torch.float16, tokens=300),
    Case(4096, Options(64, "softmax_topk"), tokens=65),
    Case(512, Options(512), tokens=33),
)


def routed(logits: torch.Tensor, bias: torch.Tensor | None, spec: Options) -> tuple[torch.Tensor, torch.Tensor]:
    options = spec._asdict() | {"top_k_groups": spec.top_k_groups if spec.groups > 1 else None}
    return route(logits, selection_bias=bias, **options)


@pytest.mark.parametrize("case", [*CASES, *NOT_FOR_KERNEL, *LARGE], ids=str)
def test_it_is_right(case: Case) -> None:
    assert examine(case, routed, "cuda") == []


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_it_is_right_at_any_alignment(shift: int) -> None:
    memory = torch.randn(9 * 130 + shift, device="cuda").bfloat16()
    logits = memory[shift:].view(9, 130)[:, :128]
    for got, right in zip(route(logits, 8), route_by_pytorch(logits, None, Options(8)), strict=True):
        torch.testing.assert_close(got, right)


def test_a_call_of_another_type_is_refused_after_one_that_was_served() -> None:
    logits = torch.randn(4, 8, device="cuda")
    route(logits, 1)
    with pytest.raises(TypeError, match="top_k is True; it must be an integer"):
        route(logits, True)
    with pytest.raises(TypeError, match="scaling_factor is True; it must be a real number"):
        route(logits, 1, scaling_factor=True)
    with pytest.raises(TypeError, match=r"scoring is \['softmax'\]; it must be one of"):
        route(logits, 1, scoring=["softmax"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="selection_bias is on cpu and router_logits on cuda:0; they must be on the same"):
        route(logits, 1, scoring="sigmoid", selection_bias=torch.zeros(8))


def test_nothing_waits_for_the_device() -> None:
    logits, bias = tensors_of(Case(64, Options(4, "sigmoid"), bias="bias"), "cuda")
    ways: list[dict[str, Any]] = [{}, {"scoring": "sigmoid", "selection_bias": bias, "groups": 4, "top_k_groups": 2}]
    for way in ways:
        route(logits, 4, **way)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for way in ways:
            ids = route(logits, 4, **way)[1]
            route(logits.clone().requires_grad_(), 4, **way)[0].sum().backward()
            sum(route_with_losses(logits.clone().requires_grad_(), None, *Options(4))[2:]).backward()  # type: ignore[union-attr]
            balance_loss(logits, ids)
            expert_load(ids, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_with_new_logits() -> None:
    logits = torch.randn(33, 128, device="cuda")
    route(logits, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = route(logits, 8)
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    right_weights, right_ids = route_by_pytorch(logits, None, Options(8))
    assert torch.equal(ids, right_ids)
    torch.testing.assert_close(weights, right_weights)


def test_torch_compile_serves_it_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = []
    kernel = module.kernels()
    monkeypatch.setattr(kernel, "bind", lambda *call, _bind=kernel.bind: bound.append(call) or _bind(*call))
    calls.LAUNCHES.clear()

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = route(2 * x, 8, normalize="sum")
        return weights + 1, ids

    x = torch.randn(70, 128, device="cuda")
    compiled = torch.compile(layer, fullgraph=True)(x)
    assert len(bound) == 1
    for got, right in zip(compiled, layer(x), strict=True):
        torch.testing.assert_close(got, right)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("case", [*GRADIENTS.values(), (70_001, 130, 3, {}), (300, 4096, 9, {})], ids=str)
def test_gradients_and_losses_are_right(case: tuple[int, int, int, dict[str, Any]], dtype: torch.dtype) -> None:
    for sliced in (False, True):
        assert wrong(*case, dtype, sliced, "cuda") == []


def test_one_build_serves_all_numbers_of_tokens() -> None:
    builds = launch._BUILDS
    route(torch.randn(1, 96, device="cuda"), 3)
    before = len(builds)
    for tokens in (2, 16, 17, 100, 1000):
        route(torch.randn(tokens, 96, device="cuda"), 3)
    assert len(builds) == before
