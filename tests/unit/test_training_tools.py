"""PyTorch's tools for training around our operators: the FLOP counter and selective activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature, unwrap
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashmoe_science as fms
from flashmoe_science import attention, moe, parallel, serving
from flashmoe_science import packed as packed_functions
from flashmoe_science.dispatch.select import Decision
from flashmoe_science.integrations import diffusers, flash_attn, flash_attn_interface
from flashmoe_science.kernel import Config
from flashmoe_science.ops import calls
from flashmoe_science.ops.attention.front.backward import autograd
from flashmoe_science.ops.attention.front.backward.operator import OPERATOR
from flashmoe_science.ops.cache import Cache
from flashmoe_science.ops.moe.route import route


@pytest.fixture
def by_our_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients through ``flashmoe::attention_backward`` on the CPU too, where PyTorch's operators serve them."""
    decision = Decision("ours", Config(), "", "requested")
    monkeypatch.setattr(calls, "LAUNCHES", Cache(8))  # a launch keeps the decision
    monkeypatch.setattr(autograd, "choose_backward", lambda *call: decision)
    monkeypatch.setattr(autograd, "is_plain", lambda *tensors: False)
    monkeypatch.setattr(autograd, "OPERATOR", lambda *given: OPERATOR(*given[:10], None, *given[11:]))


def flops(call: object) -> int:
    assert fms.flash_attn_func  # imported before the counter is made, as by whoever names it at the top of a script
    assert fms.fused_moe
    with FlopCounterMode(display=False) as counter:
        call()  # type: ignore[operator]
    return counter.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_what_pytorchs_counts(causal: bool) -> None:
    q, k, v = torch.randn(2, 8, 48, 16), torch.randn(2, 2, 48, 16), torch.randn(2, 2, 48, 32)
    ours = flops(lambda: fms.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, kernel=None))
    assert ours == 2 * 2 * 8 * 48 * 48 * (16 + 32)
    q, k, v = (torch.randn(2, 8, 48, 16, requires_grad=True) for _ in range(3))

    def step(attention: object) -> None:
        attention(q, k, v, is_causal=causal).sum().backward()  # type: ignore[operator]

    assert flops(lambda: step(F.scaled_dot_product_attention)) == flops(lambda: step(fms.scaled_dot_product_attention))


def test_the_backward_counts_five_products(by_our_operator: None) -> None:
    q, k, v = (torch.randn(2, 48, 8, 16, requires_grad=True) for _ in range(3))
    found = flops(lambda: fms.flash_attn_func(q, k, v, causal=True).sum().backward())
    assert found >= (2 + 5) * 2 * 2 * 8 * 48 * 48 * 16  # the operator's own, by PyTorch on a CPU, count too
    with FlopCounterMode(display=False) as counter:
        fms.flash_attn_func(q, k, v, causal=True).sum().backward()
    counts = {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}
    assert counts["flashmoe.attention_forward"] == 2 * 2 * 2 * 8 * 48 * 48 * 16
    assert counts["flashmoe.attention_backward"] == 5 * 2 * 2 * 8 * 48 * 48 * 16


def test_packed_sequences_count_by_their_lengths() -> None:
    cu = torch.tensor([0, 3, 3, 20], dtype=torch.int32)
    q, k, v = (torch.randn(20, 4, 16) for _ in range(3))
    assert flops(lambda: fms.flash_attn_varlen_func(q, k, v, cu, cu, 17, 17)) == 4 * 4 * 16 * (3 * 3 + 17 * 17)


def test_experts_count_every_pair() -> None:
    x, w1, w2 = torch.randn(5, 16), torch.randn(4, 24, 16), torch.randn(4, 16, 12)
    weights, ids = torch.rand(5, 2), torch.randint(0, 4, (5, 2))
    assert flops(lambda: fms.fused_moe(x, w1, w2, weights, ids)) == 2 * 5 * 2 * (24 * 16 + 16 * 12)


class Calls(TorchDispatchMode):
    """Counts the forward's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.flashmoe.attention_forward.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept", [True, False])
def test_a_checkpointed_block_attends_once_where_attention_is_kept(kept: bool, by_our_operator: None) -> None:
    x = torch.randn(1, 2, 24, 16, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return fms.flash_attn_func(*(3 * [x.sin()]), causal=True)

    block(x).sum().backward()
    expected, x.grad = x.grad, None
    with Calls() as calls:
        options = {"context_fn": fms.checkpoint_context} if kept else {}
        checkpoint(block, x, use_reentrant=False, **options).sum().backward()
    assert calls.count == (1 if kept else 2)
    torch.testing.assert_close(x.grad, expected)


def attends(x: torch.Tensor) -> torch.Tensor:
    out = fms.flash_attn_func(*(3 * [x.view(1, -1, 2, 16)]), causal=True)
    assert isinstance(out, torch.Tensor)
    return out.view(x.shape) + fms.scaled_dot_product_attention(*(3 * [x[None]]))[0]


def routes(x: torch.Tensor) -> torch.Tensor:
    weights, ids = fms.route(x[:, :4], 2)
    return fms.fused_moe(x, torch.ones(4, 16, 32), torch.ones(4, 32, 8), weights, ids)


# PyTorch 2.13 and 2.14 look up a float that is an argument's default, or is in a global, in the first region's graph.
@pytest.mark.slow
@pytest.mark.parametrize("block", [attends, routes])
def test_regions_of_a_graph_that_is_compiled_for_any_length_are_checkpointed(block: Callable[..., torch.Tensor]) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(block, x, use_reentrant=False)
        return x.sum()

    compiled = torch.compile(twice, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (8, 12):
        x = torch.randn(length, 32, requires_grad=True)
        (expected,) = torch.autograd.grad(twice(x), x)
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], expected)


def test_no_float_is_a_default_of_what_torch_compile_traces() -> None:
    """See the test before."""
    traced = [attention, packed_functions, serving, moe, flash_attn, flash_attn_interface, diffusers, parallel, route]
    named = [one for module in traced for one in vars(module).values() if isinstance(one, FunctionType)]
    functions = [one for one in named if isinstance(unwrap(one), FunctionType)]  # no autograd rule's ``apply``
    assert len({one.__name__ for one in functions} & {"flash_attn_func", "fused_moe", "route", "context_attention"}) == 4
    for function in functions:
        assert not any(type(one.default) is float for one in signature(function).parameters.values()), function.__qualname__


def test_what_is_kept_for_the_backward_is_what_was_given_and_the_results(by_our_operator: None) -> None:
    """FSDP2 frees a parameter by its storage: a copy of one would stay."""
    fused, sinks = torch.randn(24, 8, 16, requires_grad=True), torch.randn(4, requires_grad=True)
    starts = torch.tensor([0, 10, 24], dtype=torch.int32)
    bias = torch.randn(1, 1, 24, 24, requires_grad=True)
    q, k, v = fused.split((4, 2, 2), 1)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    def packed() -> torch.Tensor:
        out = fms.flash_attn_varlen_func(q, k, v, starts, starts, 14, 14, causal=True, s_aux=sinks)
        assert isinstance(out, torch.Tensor)
        return out

    def biased() -> torch.Tensor:
        views = [one.transpose(0, 1)[None] for one in (q, k, v)]
        out: torch.Tensor = torch.ops.flashmoe.attention_forward(*views, "full", bias=bias.expand(1, 4, 24, 24))[0]
        return out

    for call, given in ((packed, [fused, sinks, starts]), (biased, [fused, bias])):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = call()
        ours = {one.untyped_storage().data_ptr() for one in given}
        others = [one for one in kept if one.untyped_storage().data_ptr() not in ours]
        assert len(kept) - len(others) >= len(given)
        assert [one.untyped_storage().nbytes() for one in others] == [
            24 * 4 * 16 * 4,
            24 * 4 * 4,
        ]  # out, lse
        assert others[0].untyped_storage().data_ptr() == out.untyped_storage().data_ptr()


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out, lse, _ = fms.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    return out.square().sum() + lse.sin().sum()


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32) * q.shape[1]
    rows = [one.flatten(0, 1) for one in (q, k, v)]
    out, lse = fms.flash_attn_varlen_func(
        *rows, starts, starts, q.shape[1], q.shape[1], causal=True, window_size=(5, 0), return_attn_probs=True
    )
    return out.square().sum() + lse.sin().sum()


@pytest.mark.parametrize("function", [dense, packed])
@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=pytest.mark.redundant)], ids=["ours", "pytorch"])
@torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
def test_one_compilation_trains_at_every_length(function: object, ours: bool, request: pytest.FixtureRequest) -> None:
    if ours:
        request.getfixturevalue("by_our_operator")
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, length in ((5, 7), (3, 12), (5, 40)):  # equal sizes would be one to PyTorch
        shapes = ((batch, length, 4, 16), (batch, length, 2, 16), (batch, length, 2, 16))
        inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
        want, got = (torch.autograd.grad(each(*inputs), inputs) for each in (function, compiled))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)


def trained(steps: int) -> list[torch.Tensor]:
    """The weights of two layers after some steps with both losses of the router, and the loss before and after."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(fms.FlashMoELayer(16, 24, 6, 2, dtype=torch.bfloat16) for _ in range(2)))
    optimiser = torch.optim.AdamW(layers.parameters(), lr=2e-3)
    x, target, losses = torch.randn(40, 16).bfloat16(), torch.randn(40, 16), []
    for _ in range(steps):
        loss, states = torch.zeros(()), x
        for layer in layers:
            logits = layer.router_logits(states)
            states = layer(states, logits)
            loss = loss + 0.01 * fms.balance_loss(logits, logits.topk(2).indices) + 0.001 * fms.z_loss(logits)
        loss = loss + (states - target).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.detach())
    return [*layers.parameters(), losses[0], losses[-1]]


def test_two_trainings_end_in_equal_bits() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        first, second = trained(30), trained(30)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))
    assert first[-1] < first[-2]
