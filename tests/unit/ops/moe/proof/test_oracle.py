"""The MoE oracle and the routing reference against loops over single tokens."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.ops.moe.cases import CASES, Case, inputs_of, reference

from flashmoe_science.ops.moe.call import Tensors
from flashmoe_science.ops.moe.proof.oracle import moe_oracle, moe_plain, moe_scheme, routing_oracle

TOKENS, EXPERTS, TOP_K, DIM, HIDDEN = 7, 5, 3, 6, 4


@pytest.fixture
def layer() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, DIM, generator=generator)
    w1 = torch.randn(EXPERTS, 2 * HIDDEN, DIM, generator=generator)
    w2 = torch.randn(EXPERTS, DIM, HIDDEN, generator=generator)
    weights, ids = routing_oracle(torch.randn(TOKENS, EXPERTS, generator=generator), TOP_K)
    return Tensors(x, w1, w2, weights.float(), ids)


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


def test_what_rows_in_e4m3_cost_is_a_rounding_of_three_bits_each() -> None:
    """Two products of rows that are off by at most 2^-4, evenly: some 2.7% each, and 4% together."""
    layer = inputs_of(Case("moe t40 e3 k2 d256 f256 bf16 w:fp8_block"), "cpu").tensors
    scheme, exact = moe_scheme(layer), moe_oracle(layer)
    cost = (scheme - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.02 < cost < 0.06


def test_the_oracle_is_the_loop(layer: Tensors) -> None:
    torch.testing.assert_close(moe_oracle(layer), naive(*layer[:5]), rtol=1e-12, atol=1e-12)


def test_gate_and_up_are_not_exchangeable(layer: Tensors) -> None:
    swapped = layer._replace(w1=layer.w1.roll(HIDDEN, 1))
    assert not torch.allclose(moe_oracle(swapped), moe_oracle(layer))


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)])
def test_the_plain_version_is_off_by_its_rounding(layer: Tensors, dtype: torch.dtype, unit: float) -> None:
    low = layer._replace(x=layer.x.to(dtype), w1=layer.w1.to(dtype), w2=layer.w2.to(dtype))
    exact, plain = moe_oracle(low), moe_plain(low)
    assert plain.dtype == dtype
    error = (plain.double() - exact).abs().max().item() / exact.abs().max().item()
    assert 0 < error < 8 * unit


def test_an_expert_of_no_token_is_not_read(layer: Tensors) -> None:
    layer.topk_ids[layer.topk_ids == 2] = 3
    layer.w1[2], layer.w2[2] = torch.nan, torch.nan
    assert torch.isfinite(moe_oracle(layer)).all()


@pytest.mark.parametrize("case", [case for case in CASES if case.routing == "random"], ids=str)
def test_the_oracle_is_the_formula_of_every_activation_and_layout(case: Case) -> None:
    inputs = inputs_of(case, "cpu")
    torch.testing.assert_close(moe_oracle(inputs.tensors, inputs.activation), reference(inputs), rtol=1e-6, atol=1e-6)


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
