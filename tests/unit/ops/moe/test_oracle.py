"""The MoE oracle and the routing reference against loops over single tokens."""

from __future__ import annotations

import math

import pytest
import torch

from flashmoe_science.ops.moe.proof.oracle import moe_oracle, moe_plain, routing_oracle

TOKENS, EXPERTS, TOP_K, DIM, HIDDEN = 7, 5, 3, 6, 4


@pytest.fixture
def layer() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, DIM, generator=generator)
    w1 = torch.randn(EXPERTS, 2 * HIDDEN, DIM, generator=generator)
    w2 = torch.randn(EXPERTS, DIM, HIDDEN, generator=generator)
    weights, ids = routing_oracle(torch.randn(TOKENS, EXPERTS, generator=generator), TOP_K)
    return x, w1, w2, weights.float(), ids


def naive(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(TOKENS, DIM, dtype=torch.float64)
    for t in range(TOKENS):
        for j in range(TOP_K):
            expert = int(ids[t, j])
            for d in range(DIM):
                total = 0.0
                for f in range(HIDDEN):
                    gate = float(w1[expert, f].double() @ x[t].double())
                    up = float(w1[expert, HIDDEN + f].double() @ x[t].double())
                    total += gate / (1 + math.exp(-gate)) * up * float(w2[expert, d, f])
                out[t, d] += float(weights[t, j]) * total
    return out


def test_the_oracle_is_the_loop(layer: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(moe_oracle(*layer), naive(*layer), rtol=1e-12, atol=1e-12)


def test_gate_and_up_are_not_exchangeable(layer: tuple[torch.Tensor, ...]) -> None:
    x, w1, *rest = layer
    swapped = torch.cat([w1[:, HIDDEN:], w1[:, :HIDDEN]], 1)
    assert not torch.allclose(moe_oracle(x, swapped, *rest), moe_oracle(*layer))


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)])
def test_the_plain_version_is_off_by_its_rounding(layer: tuple[torch.Tensor, ...], dtype: torch.dtype, unit: float) -> None:
    x, w1, w2, *routing = layer
    low = (x.to(dtype), w1.to(dtype), w2.to(dtype), *routing)
    exact, plain = moe_oracle(*low), moe_plain(*low)
    assert plain.dtype == dtype
    error = (plain.double() - exact).abs().max().item() / exact.abs().max().item()
    assert 0 < error < 8 * unit


def test_an_expert_of_no_token_is_not_read(layer: tuple[torch.Tensor, ...]) -> None:
    x, w1, w2, weights, ids = layer
    ids = torch.where(ids == 2, 3, ids)
    w1, w2 = w1.clone(), w2.clone()
    w1[2], w2[2] = torch.nan, torch.nan
    assert torch.isfinite(moe_oracle(x, w1, w2, weights, ids)).all()


def test_routing_takes_the_most_probable_and_renormalises() -> None:
    logits = torch.tensor([[0.0, math.log(4.0), math.log(3.0), math.log(2.0)]])
    weights, ids = routing_oracle(logits, 2)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[4 / 7, 3 / 7]], dtype=torch.float64), rtol=1e-6, atol=0)
    weights, _ = routing_oracle(logits, 2, renormalise=False)
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.3]], dtype=torch.float64), rtol=1e-6, atol=0)
    _, ids = routing_oracle(torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0]]), 2)
    assert ids.tolist() == [[1, 2]]  # of equals the lowest
    close = torch.tensor([[1.0, 100.0, torch.nextafter(torch.tensor(100.0), torch.tensor(200.0)).item()]])
    assert routing_oracle(close, 1)[1].item() == 2  # whose probabilities round to one number in fp32
    with pytest.raises(ValueError, match="top_k is 5; it must be from 1 to 4"):
        routing_oracle(logits, 5)
