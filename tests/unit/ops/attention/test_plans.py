"""The eager path: what is planned once, what is planned anew, and what never reaches a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashmoe_science import explain, flash_attention_forward, flash_attn_func, scaled_dot_product_attention
from flashmoe_science.dispatch import registry
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import CannotServe
from flashmoe_science.ops import attention as operator
from flashmoe_science.ops import plans

if TYPE_CHECKING:
    from tests.unit.ops.conftest import FakeKernel


def tensors(batch: int = 2, heads: int = 4, queries: int = 8, keys: int = 8, width: int = 16) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(batch, heads, queries, width),
        torch.randn(batch, heads, keys, width),
        torch.randn(batch, heads, keys, width),
    )


def test_a_second_call_of_the_kind_neither_checks_nor_plans(fake: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    scaled_dot_product_attention(q, k, v, kernel="fake")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the second call must find its plan")

    for module in (plans, operator):
        for name in ("check_tensors", "check_sizes", "make_plan"):
            monkeypatch.setattr(module, name, fail)
    out = scaled_dot_product_attention(q, k + 1, v + 1, kernel="fake")
    assert (len(fake.planned), fake.launches) == (1, 2)
    assert torch.all(out == 16**-0.5)


def test_what_decides_a_launch_makes_a_new_plan(fake: FakeKernel) -> None:
    q, k, v = tensors()
    memory = torch.randn(2 * 4 * 8 * 16 + 1)
    wide = torch.randn(2, 4, 8, 32)
    variants = [
        lambda: scaled_dot_product_attention(q, k, v, kernel="fake"),
        lambda: scaled_dot_product_attention(q, k, v, is_causal=True, kernel="fake"),
        lambda: scaled_dot_product_attention(q, k, v, scale=-1.0, kernel="fake"),
        lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True, kernel="fake"),
        lambda: scaled_dot_product_attention(wide[..., :16], k, v, kernel="fake"),  # strides
        lambda: scaled_dot_product_attention(memory[1:].view(2, 4, 8, 16), k, v, kernel="fake"),  # alignment of one
        lambda: scaled_dot_product_attention(q, memory[1:].view(2, 4, 8, 16), v, kernel="fake"),  # and of another
        lambda: scaled_dot_product_attention(q[:, :, :4], k, v, kernel="fake"),  # shape
        lambda: scaled_dot_product_attention(q.half(), k.half(), v.half(), kernel="fake"),
    ]
    for count, call in enumerate(variants, start=1):
        call()
        call()
        assert len(fake.planned) == count, count


def test_positive_scales_share_a_plan_and_each_reaches_the_kernel(fake: FakeKernel) -> None:
    q, k, v = tensors()
    for scale in (0.5, 2, None, 3.5):
        out = scaled_dot_product_attention(q, k, v, scale=scale, kernel="fake")
        assert torch.all(out == (16**-0.5 if scale is None else scale))
    assert len(fake.planned) == 1


def test_the_output_keeps_the_memory_order_of_the_queries(fake: FakeKernel) -> None:
    q, k, _ = tensors(queries=3)
    value = torch.randn(2, 4, 8, 5)
    out = scaled_dot_product_attention(q, k, value, kernel="fake")
    assert (out.shape, out.stride()) == ((2, 4, 3, 5), (60, 15, 5, 1))
    token_first = torch.randn(2, 3, 4, 16).transpose(1, 2)
    out = scaled_dot_product_attention(token_first, k, value, kernel="fake")
    assert (out.shape, out.stride()) == ((2, 4, 3, 5), (60, 5, 20, 1))
    assert fake.planned[-1].problem.layout == "bshd"
    planned = fake.planned[-1].out
    assert planned is not None
    assert planned.stride() == out.stride()


def test_the_plan_cache_is_bounded(fake: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "MAX_PLANS", 3)
    for rows in range(1, 9):
        q, k, v = tensors(queries=rows)
        scaled_dot_product_attention(q, k, v, kernel="fake")
        assert len(operator._PLANS) <= 3
    assert len(fake.planned) == 8


def test_a_refused_plan_is_an_error_where_the_kernel_was_asked_for(fake: FakeKernel) -> None:
    fake.refusal = "k is not aligned to 16 bytes"
    q, k, v = tensors()
    with pytest.raises(CannotServe, match=r"kernel 'fake' cannot serve .*: k is not aligned to 16 bytes; sdpa can"):
        scaled_dot_product_attention(q, k, v, kernel="fake")
    assert not operator._PLANS


def test_a_refused_plan_passes_the_kernel_over_where_the_choice_is_automatic(
    fake: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.refusal = "q is not aligned to 16 bytes"
    monkeypatch.setattr(registry, "OURS", (fake.kernel(),))
    monkeypatch.setattr(plans, "_gpu_of", lambda q: gpu_named("h200"))
    q, k, v = tensors()
    decision = explain(q, k, v)
    assert (decision.kernel, decision.others) == ("sdpa", (("fake", "q is not aligned to 16 bytes"),))


def test_gradients_are_an_error_for_a_kernel_asked_for_and_pytorch_otherwise(fake: FakeKernel) -> None:
    q, k, v = tensors()
    q.requires_grad_()
    with pytest.raises(CannotServe, match=r"kernel 'fake' .*requires gradients"):
        scaled_dot_product_attention(q, k, v, kernel="fake")
    with torch.no_grad():
        scaled_dot_product_attention(q, k, v, kernel="fake")
    assert fake.launches == 1
    decision = explain(q, k, v)
    assert (decision.kernel, decision.basis) == ("sdpa", "required")
    assert "gradients" in decision.reason
    scaled_dot_product_attention(q, k, v).sum().backward()
    assert q.grad is not None


class CountingMode(TorchDispatchMode):
    """Counts the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator(fake: FakeKernel) -> None:
    q, k, v = tensors()
    with CountingMode() as mode:
        out = scaled_dot_product_attention(q, k, v, kernel="fake")
    assert mode.seen == ["flashmoe.attention_forward.default"]
    assert torch.all(out == 0.25)


class Tagged(torch.Tensor):
    """A subclass whose functions return it."""


def test_a_subclass_goes_through_the_operator_and_comes_back(fake: FakeKernel) -> None:
    q, k, v = (tensor.as_subclass(Tagged) for tensor in tensors())
    assert isinstance(scaled_dot_product_attention(q, k, v, kernel="fake"), Tagged)


def test_a_lazily_negated_view_is_refused(fake: FakeKernel) -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"query is a lazily negated view"):
        scaled_dot_product_attention(torch._neg_view(q), k, v, kernel="fake")


def test_the_log_sum_exp_goes_straight_into_the_users_tensor(fake: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "OURS", (fake.kernel(),))
    monkeypatch.setattr(plans, "_gpu_of", lambda q: gpu_named("h200"))
    q, k, v = tensors()
    for memory in (torch.zeros(65)[:64], torch.zeros(65)[1:], torch.zeros(2, 4, 8)):
        flash_attention_forward(q, k, v, memory, False, 0.5)
        assert torch.all(memory == float(fake.launches))
    token_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    result = flash_attn_func(*token_first, return_attn_probs=True)
    assert isinstance(result, tuple)
    out, lse, nothing = result
    assert (out.shape, lse.shape, nothing) == ((2, 8, 4, 16), (2, 4, 8), None)
