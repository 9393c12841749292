"""What none of our kernels takes, fp64 and dropout, is served by PyTorch's operators in every function, and differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.tensors import i32

import flashmoe_science as fm

Call = Callable[..., Any]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


HEADS_FIRST = (randn(2, 4, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 6))
TOKENS_FIRST = tuple(one.transpose(1, 2).contiguous() for one in HEADS_FIRST)
PACKED = (randn(9, 4, 8), randn(12, 2, 8), randn(12, 2, 6))
STARTS = (i32(0, 4, 4, 9), i32(0, 7, 9, 12), 5, 7)
SINKS, SLOPES = randn(4), randn(4).abs().float()
EXPERTS = (randn(5, 6), randn(3, 16, 6), randn(3, 6, 8), randn(5, 2).abs())
IDS = torch.tensor([[0, 2], [1, 0], [2, 2], [-1, 1], [3, 0]])


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return fm.flash_attn_varlen_func(q, k, v, *STARTS, **options)


def with_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> Any:
    return packed(q, k, v, causal=True, s_aux=sinks)


def filled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fm.flash_attention_forward(q, k, v, torch.empty(2, 4, 5), True, None)


def from_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return fm.flash_attn_with_kvcache(q, k, v, cache_seqlens=i32(6, 3), **options)


def experts(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return fm.fused_moe(x, w1, w2, weights, IDS)


def experts_biased(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, *biases: torch.Tensor) -> Any:
    one, other = biases
    return fm.fused_moe(x, w1, w2, weights, IDS, activation="clamped_silu", gate_up_bias=one, down_bias=other, interleaved=True)


# By name: the function of tensors that gradients are checked of, and these.
CASES: dict[str, tuple[Call, tuple[torch.Tensor, ...]]] = {
    "scaled_dot_product_attention": (lambda q, k, v: fm.scaled_dot_product_attention(q, k, v, enable_gqa=True), HEADS_FIRST),
    "flash_attention_science": (lambda q, k, v: fm.flash_attention_science(q, k, v, True), HEADS_FIRST),
    "flash_attention_forward": (filled, HEADS_FIRST),
    "flash_attn_func": (lambda q, k, v: fm.flash_attn_func(q, k, v, causal=True), TOKENS_FIRST),
    "window": (lambda q, k, v: fm.flash_attn_func(q, k, v, window_size=(2, 1)), TOKENS_FIRST),
    "causal window": (lambda q, k, v: fm.flash_attn_func(q, k, v, causal=True, window_size=(2, 0)), TOKENS_FIRST),
    "cap and slopes": (lambda q, k, v: fm.flash_attn_func(q, k, v, softcap=2.0, alibi_slopes=SLOPES), TOKENS_FIRST),
    # PyTorch's attention on a CPU takes an fp32 mask beside fp64 for what it is not from 16 keys on.
    "slopes, 19 keys": (lambda q, k: fm.flash_attn_func(q, k, k, alibi_slopes=SLOPES), (randn(1, 3, 4, 8), randn(1, 19, 2, 8))),
    "log-sum-exp": (lambda q, k, v: fm.flash_attn_func(q, k, v, return_attn_probs=True)[1], TOKENS_FIRST),
    "log-sum-exp, cap": (lambda q, k, v: fm.flash_attn_func(q, k, v, softcap=2.0, return_attn_probs=True)[1], TOKENS_FIRST),
    "log-sum-exp, packed": (lambda q, k, v: packed(q, k, v, return_attn_probs=True)[1], PACKED),
    "packed": (packed, PACKED),
    "packed, causal": (lambda q, k, v: packed(q, k, v, causal=True), PACKED),
    "packed, window": (lambda q, k, v: packed(q, k, v, window_size=(2, 1)), PACKED),
    "packed, sinks": (with_sinks, (*PACKED, SINKS)),
    "cache": (from_cache, TOKENS_FIRST),
    "cache, chunks": (lambda q, k, v: from_cache(q, k, v, causal=True, attention_chunk=3), TOKENS_FIRST),
    "experts": (experts, EXPERTS),
    "experts, biases": (experts_biased, (*EXPERTS, randn(3, 16), randn(3, 6))),
    "router": (lambda x: fm.route(x, 2, scoring="sigmoid", normalize="sum")[0], (randn(4, 5),)),
    "balance loss": (lambda x: fm.balance_loss(x, IDS), (randn(5, 4),)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_in_fp64_are_those_of_finite_differences(case: str) -> None:
    function, tensors = CASES[case]
    leaves = [one.clone().requires_grad_() for one in tensors]
    assert function(*leaves).dtype == torch.float64
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("case", CASES)
def test_fp64_is_fp32_with_more_digits(case: str) -> None:
    function, tensors = CASES[case]
    for _ in range(2):
        torch.testing.assert_close(
            function(*tensors), function(*(one.float() for one in tensors)).double(), rtol=1e-4, atol=1e-5
        )


def test_an_append_in_fp64() -> None:
    q, k, v = TOKENS_FIRST
    caches, narrow = (k.clone(), v.clone()), (k.float(), v.float())
    options: dict[str, Any] = {"cache_seqlens": i32(2, 4), "causal": True}
    options |= {"rotary_cos": torch.rand(9, 4), "rotary_sin": torch.rand(9, 4)}
    with pytest.raises(ValueError, match="rotary_cos rotates 8 dimensions"):
        fm.flash_attn_with_kvcache(q, *caches, k[:, :2], v[:, :2], **options)
    options = {"cache_seqlens": i32(2, 4), "causal": True}
    out = fm.flash_attn_with_kvcache(q, *caches, k[:, :2], v[:, :2], **options)
    other = fm.flash_attn_with_kvcache(q.float(), *narrow, k[:, :2].float(), v[:, :2].float(), **options)
    torch.testing.assert_close(out.float(), other)
    assert torch.equal(caches[0].float(), narrow[0])


def test_rotary_in_fp64_has_the_digits_of_fp64() -> None:
    angles, k = randn(9, 8), randn(1, 1, 2, 16)
    caches = torch.zeros(2, 1, 9, 2, 16, dtype=torch.float64)
    fm.flash_attn_with_kvcache(k, *caches, k, k, cache_seqlens=i32(3), rotary_cos=angles.cos(), rotary_sin=angles.sin())
    turned = torch.view_as_complex(k[0, 0].view(2, 8, 2)) * torch.polar(torch.ones(8).double(), angles[3])
    torch.testing.assert_close(caches[0, 0, 3], torch.view_as_real(turned).flatten(1), rtol=1e-14, atol=1e-14)


def test_a_layer_in_fp64() -> None:
    layer = fm.FlashMoELayer(6, 8, 4, 2, scoring="sigmoid", selection_bias=True, shared_intermediate_size=4).double()
    x = randn(3, 6).requires_grad_()
    assert layer.router_logits(x).dtype == torch.float64
    assert torch.autograd.gradcheck(layer, (x,), fast_mode=True)


def test_a_kernel_of_ours_asked_for_by_name_refuses_fp64() -> None:
    q, k, v = HEADS_FIRST
    with pytest.raises(ValueError, match=r"'fwd_triton' cannot serve.*torch\.float64"):
        fm.scaled_dot_product_attention(q, k, v, enable_gqa=True, kernel="fwd_triton")
    with pytest.raises(ValueError, match=r"'moe_grouped_triton' cannot serve.*torch\.float64"):
        fm.fused_moe(*EXPERTS, IDS, kernel="moe_grouped_triton")
    assert "torch.float64" in fm.explain(q, k, v, enable_gqa=True).reason
    decision = fm.explain(fm.fused_moe, *EXPERTS, IDS)
    assert (decision.kernel, decision.basis) == ("grouped_mm", "required")
    assert "torch.float64" in decision.reason


def test_fp64_beside_other_dtypes_is_refused() -> None:
    q, k, v = TOKENS_FIRST
    with pytest.raises(TypeError, match=r"k has dtype torch\.float32 and q has torch\.float64"):
        fm.flash_attn_func(q, k.float(), v)
    x, *weights = EXPERTS
    with pytest.raises(TypeError, match=r"hidden_states torch\.float32"):
        fm.fused_moe(x.float(), *weights, IDS)
    with pytest.raises(TypeError, match=r"top_k_weights has dtype torch\.float64"):
        fm.fused_moe(*(one.float() for one in EXPERTS[:3]), EXPERTS[3], IDS)


# Dropout ---------------------------------------------------------------------------------------------------------------------

DROPPED: dict[str, tuple[Call, tuple[torch.Tensor, ...]]] = {
    "flash_attn_func": (fm.flash_attn_func, TOKENS_FIRST),
    "causal": (lambda q, k, v, **o: fm.flash_attn_func(q, k, v, causal=True, **o), TOKENS_FIRST),
    "window": (lambda q, k, v, **o: fm.flash_attn_func(q, k, v, window_size=(4, 2), **o), TOKENS_FIRST),
    "packed": (packed, PACKED),
    "packed, causal": (lambda q, k, v, **o: packed(q, k, v, causal=True, **o), PACKED),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", DROPPED)
def test_dropout_keeps_the_mean_and_the_seed(case: str, dtype: torch.dtype) -> None:
    function, tensors = DROPPED[case]
    tensors = tuple(one.to(dtype) for one in tensors)
    whole = function(*tensors)
    torch.manual_seed(0)
    first = function(*tensors, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(function(*tensors, dropout_p=0.5), first)
    assert not torch.equal(function(*tensors, dropout_p=0.5), first)
    assert torch.equal(function(*tensors, dropout_p=1.0), torch.zeros_like(whole))
    assert torch.equal(function(*tensors, dropout_p=0.0), whole)
    mean = torch.stack([function(*tensors, dropout_p=0.2).double() for _ in range(600)]).mean(0)
    torch.testing.assert_close(mean, whole.double(), rtol=0, atol=0.15)


@pytest.mark.parametrize("case", DROPPED)
def test_dropout_has_gradients_and_leaves_the_log_sum_exp(case: str) -> None:
    function, tensors = DROPPED[case]

    def seeded(*leaves: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        out: torch.Tensor = function(*leaves, dropout_p=0.3)
        return out

    assert torch.autograd.gradcheck(seeded, [one.clone().requires_grad_() for one in tensors], fast_mode=True)
    lse = function(*tensors, dropout_p=0.3, return_attn_probs=True)[1]
    torch.testing.assert_close(lse, function(*tensors, return_attn_probs=True)[1])


def test_dropout_is_refused_of_what_it_is_not() -> None:
    for function, tensors in (DROPPED["flash_attn_func"], DROPPED["packed"]):
        with pytest.raises(ValueError, match=r"dropout_p is 1\.5; it must be from 0 to 1"):
            function(*tensors, dropout_p=1.5)
        with pytest.raises(TypeError, match=r"dropout_p is '0\.1'; it must be a real number"):
            function(*tensors, dropout_p="0.1")
        with pytest.raises(ValueError, match=r"'fwd_triton' cannot serve this call: dropout_p is 0\.1"):
            function(*tensors, dropout_p=0.1, kernel="fwd_triton")
        function(*tensors, dropout_p=0.1, kernel="sdpa")


def test_dropout_compiles_whole() -> None:
    for function, tensors in (DROPPED["window"], DROPPED["packed"]):
        compiled = torch.compile(lambda *given: function(*given, dropout_p=0.4), backend="aot_eager", fullgraph=True)  # noqa: B023
        assert compiled(*tensors).shape == function(*tensors).shape
