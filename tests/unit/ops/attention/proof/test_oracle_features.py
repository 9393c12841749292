"""The oracle of problems with features against the definition, one query and one key at a time; and its plain version."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.unit.ops.attention.held import CPU, expected_of, inputs_of
from tests.unit.ops.attention.proof.naive import naive

from flashmoe_science.measure.tolerance import check_output
from flashmoe_science.ops.attention.problem import parse
from flashmoe_science.ops.attention.proof import oracle
from flashmoe_science.ops.attention.proof.contract import CONTRACT
from flashmoe_science.ops.attention.proof.oracle import attention_oracle, attention_plain, extents

TEXTS = (
    "attn b2 h4 hk2 q3 k20 d8 bf16 left4 right2",
    "attn b2 h2 q9 k20 d8 dv4 fp16 causal left5",
    "attn b1 h2 q20 k9 d8 fp32 causal left3 softcap2 sinks",
    "attn b2 h4 hk2 q6 k9 d8 fp16 alibi sinks",
    "attn b1 h2 q6 k9 d8 fp32 causal-topleft boolmask softcap3",
    "attn b2 h4 hk1 q6 k9 d8 bf16 bias right2",
    "attn b2 h2 q9 d8 fp32 causal prefix4 sinks bshd",
    "attn b2 h2 q9 k20 d8 fp16 causal left3 prefix4",
    "attn b3 h2 q2 k30 d8 bf16 causal ragged leftpad prefix7 boolmask",
    "attn b4 h4 hk2 q2 k40 d8 bf16 causal ragged",
    "attn b4 h4 hk2 q2 k40 d8 fp16 ragged leftpad",
    "attn b4 h4 hk2 q1 k40 d8 fp16 causal ragged page8 left9 bshd",
    "attn b4 h4 hk2 q3 k40 d8 bf16 causal ragged page16 leftpad fp8kv",
    "attn b4 h2 q4 k30 d8 bf16 ragged boolmask",
    "attn b5 h2 q20 d8 fp32 causal packed bshd",
    "attn b5 h4 hk2 q20 k44 d8 bf16 packed left9 right3 sinks",
    "attn b5 h2 q30 k20 d8 bf16 causal packed",
    "attn b5 h4 hk2 q9 k44 d8 fp16 causal packed page4 alibi leftpad softcap5",
    "attn b2 h2 q5 k9 d8 bf16 fp8kv",
    "attn b2 h4 hk2 q13 k20 d16 dv8 bf16 causal",
    "attn b1 h2 q20 k13 d8 fp32 causal-topleft",
)


@pytest.mark.parametrize("text", TEXTS)
def test_the_oracle_is_the_definition(text: str) -> None:
    inputs = inputs_of(text)
    for got, right in zip(attention_oracle(inputs), naive(inputs), strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("text", TEXTS[::2])
@pytest.mark.parametrize("scores", [1, 90])
def test_chunks_change_nothing(text: str, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(text)
    whole, roughly = attention_oracle(inputs), attention_plain(inputs)
    monkeypatch.setattr(oracle, "CHUNK_SCORES", scores)
    monkeypatch.setattr(oracle, "_PLAIN_CHUNK_SCORES", scores)
    for got, right in zip(attention_oracle(inputs), whole, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    for got, right in zip(attention_plain(inputs), roughly, strict=True):
        torch.testing.assert_close(got, right, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("text", TEXTS)
def test_the_plain_version_is_within_the_bounds(text: str) -> None:
    inputs = inputs_of(text)
    out, lse = attention_plain(inputs)
    assert out.dtype == inputs.q.dtype
    assert lse.dtype == torch.float32
    tensors = CONTRACT.inputs(inputs.problem, CPU, torch.Generator().manual_seed(1))
    for name, got, one in zip(("out", "lse"), (out, lse), expected_of(inputs, tensors), strict=True):
        assert check_output(name, got, one)[1] == []


@pytest.mark.parametrize("text", [text for text in TEXTS if "ragged" in text or "page" in text])
def test_nothing_depends_on_rows_that_no_call_may_use(text: str) -> None:
    problem = parse(text)
    made = [CONTRACT.inputs(problem, CPU, torch.Generator().manual_seed(3)) for _ in range(2)]
    poisoned = CONTRACT.poisoned(problem, made[1])
    assert poisoned["k"].double().isnan().any()
    for results in zip(*(attention_oracle(CONTRACT.for_kernel(problem, one)) for one in (made[0], poisoned)), strict=True):
        assert torch.equal(*results)
    assert extents(CONTRACT.for_kernel(problem, made[0])) == extents(CONTRACT.for_kernel(problem, poisoned))


def test_sequences_without_keys_or_queries() -> None:
    inputs = inputs_of("attn b4 h2 q6 k30 d8 bf16 causal packed page8 sinks")
    lengths = torch.tensor([0, 8, 3, 30], dtype=torch.int32)
    starts = torch.tensor([0, 3, 3, 5, 5], dtype=torch.int32)
    tensors = inputs.tensors._replace(q=inputs.q[:, :, :5], cache_seqlens=lengths, cu_seqlens_q=starts)
    inputs = replace(inputs, tensors=tensors)
    for got, right in zip(attention_oracle(inputs), naive(inputs), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11)
    assert attention_plain(inputs)[0].isfinite().all()


def test_a_row_that_sees_nothing_is_zeros_and_the_sink() -> None:
    for sinks in ("", " sinks"):
        inputs = inputs_of(f"attn b1 h2 q9 k4 d8 fp32 causal{sinks}" + ("" if sinks else " softcap9"))
        for out, lse in (attention_oracle(inputs), attention_plain(inputs)):
            assert (out[:, :, :5] == 0).all()
            want = inputs.tensors.sinks[None, :, None] if sinks else torch.tensor(-math.inf)
            torch.testing.assert_close(lse[:, :, :5].float(), want.expand(1, 2, 5).float())


@pytest.mark.parametrize("distribution", CONTRACT.distributions)
def test_every_distribution_changes_every_mode_to_finite_results(distribution: str) -> None:
    for text in TEXTS[::2]:
        problem = parse(text)
        made = CONTRACT.vary(distribution, CONTRACT.inputs(problem, CPU, torch.Generator().manual_seed(2)))
        again = CONTRACT.inputs(problem, CPU, torch.Generator().manual_seed(2))
        whole = [name for name, one in made.items() if not one.is_floating_point()]
        assert all(torch.equal(made[name], again[name]) for name in whole)
        out, _ = attention_oracle(CONTRACT.for_kernel(problem, made))
        assert out.isfinite().all()
