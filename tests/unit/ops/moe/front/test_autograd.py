"""A training call that is like one before goes around PyTorch's dispatcher, and chooses and checks nothing anew, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tests.unit.interpreter import Interpreter
from tests.unit.ops.moe.front.test_backward import E, H, T, arguments, leaves
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import flashmoe_science as fm
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.hardware.probe import assume
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops import calls
from flashmoe_science.ops.cache import Cache
from flashmoe_science.ops.moe.front import choose
from flashmoe_science.ops.moe.front.backward import autograd
from flashmoe_science.ops.moe.front.backward import operator as backward_operator
from flashmoe_science.ops.moe.front.backward.operator import OPERATOR
from flashmoe_science.ops.moe.route import backward as route_backward
from flashmoe_science.ops.moe.route import route as router

Gradients = tuple[torch.Tensor, ...]


def whole(given: dict[str, Any], recompute: bool = False) -> Gradients:
    every = leaves(given)
    return torch.autograd.grad(fm.fused_moe(**given, recompute=recompute).square().sum(), every)


def recomputed(given: dict[str, Any]) -> Gradients:
    return whole(given, recompute=True)


def in_batches(given: dict[str, Any]) -> Gradients:
    names = ("hidden_states", "top_k_weights", "top_k_ids")
    turned = {name: given[name].detach().mT.contiguous() for name in ("gate_up_proj", "down_proj")}
    every = leaves(given | turned)
    batched = {name: given[name].unflatten(0, (2, -1)) for name in names}
    return torch.autograd.grad(fm.fused_moe(**given | batched | turned, transposed=True).square().sum(), every)


def of_a_pair(given: dict[str, Any]) -> Gradients:
    gate, up = (one.detach().contiguous().requires_grad_() for one in given["gate_up_proj"].chunk(2, 1))
    x = given["hidden_states"].requires_grad_()
    return torch.autograd.grad(fm.fused_moe(**given | {"gate_up_proj": (gate, up)}).square().sum(), (x, gate, up))


def added(given: dict[str, Any]) -> Gradients:
    leaves(given)
    sums = tuple(torch.ones_like(given[name], dtype=torch.float32) for name in ("gate_up_proj", "down_proj"))
    (dx,) = torch.autograd.grad(fm.fused_moe(**given, weight_grads=sums).square().sum(), given["hidden_states"])
    return dx, *sums


def routed(given: dict[str, Any]) -> Gradients:
    logits = given["hidden_states"].detach().float().requires_grad_()
    return torch.autograd.grad(fm.route(logits, 2, normalize="sum")[0].square().sum(), logits)


def with_losses(given: dict[str, Any]) -> Gradients:
    logits = given["hidden_states"].detach().float().requires_grad_()
    weights, _, *losses = router.route_with_losses(logits, None, 2, "softmax", "sum", 1, None, 1.0)
    return torch.autograd.grad((weights.square().sum(), *losses), logits)


def refuse(*given: Any, **more: Any) -> Any:
    raise AssertionError("a check, a choice or the arguments of an operator")


@contextmanager
def nothing_anew() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (choose, "checked"), (choose, "choose_backward"), (choose, "decide_training"),
            (backward_operator, "choose_backward"),
            (autograd, "_by_operator"), (autograd, "OPERATOR"), (autograd, "ADDING"), (autograd, "names_of"),
            (router, "_OPERATOR"), (router, "_WITH_LOSSES"), (router, "checked_options"), (route_backward, "OPERATOR"),
        ):  # fmt: skip
            patch.setattr(module, name, refuse)
        yield


@pytest.fixture(autouse=True)
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LAUNCHES", Cache(64))


WAYS = (whole, recomputed, in_batches, of_a_pair, added, routed, with_losses)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_second_call_chooses_nothing_and_builds_no_arguments_of_operators(way: Callable[[dict[str, Any]], Gradients]) -> None:
    given = arguments(torch.bfloat16, bias=True)
    first = way(given)
    with nothing_anew():
        second = way(given)
    assert all(map(torch.equal, first, second))
    calls.LAUNCHES.clear()
    with pytest.raises(AssertionError, match="a choice"), nothing_anew():
        way(given)


def test_when_the_switch_for_deterministic_algorithms_is_turned_a_call_is_new_once() -> None:
    given = arguments(torch.bfloat16)
    first = whole(given)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(AssertionError, match="a choice"), nothing_anew():
            whole(given)
        assert all(map(torch.equal, first, whole(given)))
        with nothing_anew():
            whole(given)
    finally:
        torch.use_deterministic_algorithms(False)
    with nothing_anew():
        whole(given)


class Seen(TorchDispatchMode):
    """Names of the package's operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "flashmoe":
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", ["both", "backward"])
def test_a_mode_sees_the_operators_after_calls_around_them(inside: str) -> None:
    given: dict[str, Any] = dict(arguments(torch.bfloat16))
    logits = torch.randn(T, E, requires_grad=True)
    every = [logits, *leaves(given)[:3]]

    def forward() -> torch.Tensor:
        weights, ids = fm.route(logits, 2)
        return fm.fused_moe(**given | {"top_k_weights": weights, "top_k_ids": ids}).sum()

    want = torch.autograd.grad(forward(), every)
    seen = Seen()
    with seen if inside == "both" else nullcontext():
        out = forward()
    with seen:
        got = torch.autograd.grad(out, every)
    backward = ["flashmoe::moe_backward", "flashmoe::moe_route_backward"]
    of_forward = ["flashmoe::moe_route", "flashmoe::moe_forward_saving"] if inside == "both" else []
    assert seen.names == of_forward + backward
    assert all(map(torch.equal, want, got))


def test_input_scales_of_every_call_are_checked() -> None:
    x = torch.randn(T, 32, requires_grad=True)
    w1, w2 = torch.randn(E, 48, 32), torch.randn(E, 32, 24)
    of_format = fm.quantize_experts(w1, w2, "fp8_channel")
    weights, ids = torch.rand(T, 2), torch.zeros(T, 2, dtype=torch.int64)

    def call(scale: torch.Tensor) -> Gradients:
        scales = {"gate_up_input_scale": scale, "down_input_scale": torch.ones(E)}
        static = of_format | scales | {"weight_format": "fp8_channel_static"}
        return torch.autograd.grad(fm.fused_moe(x, top_k_weights=weights, top_k_ids=ids, **static).sum(), x)

    first = call(torch.ones(E))
    with nothing_anew():
        assert all(map(torch.equal, first, call(torch.ones(E))))
        with pytest.raises(ValueError, match="gate_up_input_scale has a value of 0; it must be above 0"):
            call(torch.zeros(E))


def test_products_are_counted_after_calls_around_the_operators() -> None:
    given = arguments()
    whole(given)
    with FlopCounterMode(display=False) as counter:
        whole(given)
    assert {"flashmoe.moe_forward_saving", "flashmoe.moe_backward"} <= {str(one) for one in counter.get_flop_counts()["Global"]}


def test_states_that_the_copy_engine_does_not_take_are_left_to_others() -> None:
    """But a kernel that is asked for by name is refused."""
    given = arguments(torch.bfloat16)
    want = whole(given)
    x = torch.empty(T * H + 1, dtype=torch.bfloat16)[1:].view(T, H).copy_(given["hidden_states"].detach())
    tensors = x, *(given[name].detach() for name in ("gate_up_proj", "down_proj", "top_k_weights", "top_k_ids"))
    silu, absent = ("silu", True, False, 1.702, 7.0), 8 * [None]
    out, z = torch.ops.flashmoe.moe_forward_saving.default(*tensors, *absent, *silu)
    call = (*tensors, *absent, z, 2 * out, [True] * 6, *silu)
    calls.LAUNCHES.clear()
    with assume(gpu_named("h200")):
        got = OPERATOR(*call)
        with pytest.raises(CannotServe, match=r"moe_bwd_gluon_sm90.*hidden_states does not start at a multiple of 16 bytes"):
            OPERATOR(*call, "moe_bwd_gluon_sm90")
    for one, other in zip(want, got, strict=False):
        assert torch.equal(one, other)


def test_our_kernels_are_right_around_the_dispatcher_in_tritons_interpreter(interpreted: Interpreter) -> None:
    found = interpreted("ops/moe/front/trained.py")
    assert len(found) == 4
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
