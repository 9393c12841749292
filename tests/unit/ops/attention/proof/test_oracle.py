"""The oracle against PyTorch's own attention in fp64, and against itself when it has to work in chunks."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.ops.attention.held import inputs_of
from torch.nn.functional import scaled_dot_product_attention

from flashmoe_science.ops.attention.call.kernel import AttentionInputs
from flashmoe_science.ops.attention.proof import oracle
from flashmoe_science.ops.attention.proof.oracle import attention_oracle, attention_plain

PROBLEMS = (
    "attn b2 h4 q65 d64 fp32",
    "attn b1 h2 q33 k70 d40 dv24 fp16 causal",
    "attn b1 h6 hk2 q50 k50 d16 bf16 causal bshd",
    "attn b2 h4 hk1 q70 k33 d8 fp32 causal-topleft",
    "attn b1 h1 q1 d1 fp16",
)


def torch_fp64(inputs: AttentionInputs) -> torch.Tensor:
    problem = inputs.problem
    mask = None
    if problem.causal:
        rows, keys = torch.arange(problem.seqlen_q)[:, None], torch.arange(problem.seqlen_k)[None, :]
        mask = keys <= rows + problem.causal_offset
    q, k, v = (tensor.double() for tensor in (inputs.q, inputs.k, inputs.v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=inputs.softmax_scale, enable_gqa=True)


@pytest.mark.parametrize("text", PROBLEMS)
def test_oracle_agrees_with_pytorch_in_fp64(text: str) -> None:
    inputs = inputs_of(text)
    out, lse = attention_oracle(inputs)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, torch_fp64(inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.parametrize("scores", [1, 200, 7000])
def test_chunks_change_nothing(text: str, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(text)
    whole = attention_oracle(inputs)
    plain = attention_plain(inputs)
    monkeypatch.setattr(oracle, "CHUNK_SCORES", scores)
    monkeypatch.setattr(oracle, "_PLAIN_CHUNK_SCORES", scores)
    for got, expected in zip(attention_oracle(inputs), whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for got, expected in zip(attention_plain(inputs), plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)


def test_a_query_that_sees_one_key_returns_its_value_and_score() -> None:
    inputs = inputs_of("attn b1 h1 q3 d4 fp32 causal")
    out, lse = attention_oracle(inputs)
    torch.testing.assert_close(out[0, 0, 0], inputs.v[0, 0, 0].double())
    expected = (inputs.q[0, 0, 0].double() @ inputs.k[0, 0, 0].double()).item() * inputs.softmax_scale
    assert lse[0, 0, 0].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("function", [attention_oracle, attention_plain])
def test_rows_that_see_no_key_are_zero_and_minus_infinity(function) -> None:
    inputs = inputs_of("attn b2 h2 q9 k4 d16 fp16 causal")  # queries 0 to 4 come before the first key
    out, lse = function(inputs)
    assert torch.equal(out[:, :, :5], torch.zeros_like(out[:, :, :5]))
    assert torch.all(lse[:, :, :5] == -math.inf)
    assert torch.isfinite(lse[:, :, 5:]).all()
    assert torch.isfinite(out).all()


def test_plain_rounds_in_the_input_dtype_and_ignores_the_callers_tf32() -> None:
    inputs = inputs_of("attn b1 h2 q64 d64 bf16")
    out, lse = attention_plain(inputs)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    torch.set_float32_matmul_precision("medium")
    try:
        attention_plain(inputs)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
