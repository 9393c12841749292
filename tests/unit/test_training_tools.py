"""PyTorch's tools for training around our operators: the FLOP counter and selective activation checkpointing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashmoe_science as fms
from flashmoe_science.dispatch.select import Decision
from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.front.backward import autograd
from flashmoe_science.ops.attention.front.backward.operator import OPERATOR


@pytest.fixture
def by_our_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients through ``flashmoe::attention_backward`` on the CPU too, where PyTorch's operators serve them."""
    decision = Decision("ours", Config(), "", "requested")
    monkeypatch.setattr(autograd, "choose_backward", lambda *call: decision)
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
