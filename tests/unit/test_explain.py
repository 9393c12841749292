"""``explain`` says what serves a call of any public function, as the call is served, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.tensors import i32

import flashmoe_science as fm
from flashmoe_science.dispatch.select import Decision
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.operations import kernel_named, parse_problem
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.front import operator, pytorch

Call = Callable[..., Any]


HEADS_FIRST = {name: torch.randn(2, 4, 8, 16) for name in ("query", "key", "value")}
TOKENS_FIRST = {name: torch.randn(2, 8, 4, 16) for name in ("q", "k", "v")}
STARTS = {"cu_seqlens_q": i32(0, 3, 8), "cu_seqlens_k": i32(0, 3, 8), "max_seqlen_q": 5, "max_seqlen_k": 5}
PACKED = {name: torch.randn(8, 4, 16) for name in ("q", "k", "v")} | STARTS
CACHE = {"q": torch.randn(2, 1, 4, 16), "k_cache": torch.randn(2, 9, 4, 16), "v_cache": torch.randn(2, 9, 4, 16)}
NEW = {"k": torch.randn(2, 1, 4, 16), "v": torch.randn(2, 1, 4, 16), "cache_seqlens": i32(3, 8)}
ROTARY = {"rotary_cos": torch.randn(9, 8), "rotary_sin": torch.randn(9, 8)}
EXPERTS = {
    "hidden_states": torch.randn(5, 16), "gate_up_proj": torch.randn(4, 48, 16), "down_proj": torch.randn(4, 16, 24),
    "top_k_weights": torch.rand(5, 2), "top_k_ids": torch.randint(4, (5, 2)),
}  # fmt: skip
LSE = torch.zeros(2, 4, 8)

# By name: the function, its arguments, the kernel that serves it on the CPU, and a word of the reason.
CASES: dict[str, tuple[Call, dict[str, Any], str, str]] = {
    "sdpa": (fm.scaled_dot_product_attention, HEADS_FIRST, "sdpa", "CPU"),
    "sdpa, mask": (fm.scaled_dot_product_attention, HEADS_FIRST | {"attn_mask": torch.rand(8, 8) > 0.3}, "sdpa", "attn_mask"),
    "sdpa, dropout": (fm.scaled_dot_product_attention, HEADS_FIRST | {"dropout_p": 0.5}, "sdpa", "dropout_p is 0.5"),
    "flash": (fm.flash_attn_func, TOKENS_FIRST, "sdpa", "CPU"),
    "flash, window": (fm.flash_attn_func, TOKENS_FIRST | {"window_size": (3, 0), "causal": True}, "sdpa", "CPU"),
    "flash, dropout": (fm.flash_attn_func, TOKENS_FIRST | {"dropout_p": 0.5}, "sdpa", "dropout_p is 0.5"),
    "flash, fp64": (fm.flash_attn_func, {name: one.double() for name, one in TOKENS_FIRST.items()}, "sdpa", "torch.float64"),
    "by name": (fm.flash_attn_func, TOKENS_FIRST | {"kernel": "sdpa"}, "sdpa", "asked for by name"),
    "packed": (fm.flash_attn_varlen_func, PACKED, "sdpa", "CPU"),
    "packed, used": (fm.flash_attn_varlen_func, PACKED | {"seqused_q": i32(2, 5)}, "sdpa", "CPU"),
    "packed, gradients": (
        fm.flash_attn_varlen_func,
        PACKED | {"q": torch.randn(8, 4, 16).requires_grad_()},
        "sdpa",
        "gradients",
    ),
    "cache": (fm.flash_attn_with_kvcache, CACHE | {"cache_seqlens": 5}, "sdpa", "CPU"),
    "append": (fm.flash_attn_with_kvcache, CACHE | NEW, "sdpa", "CPU"),
    "append, rotary": (fm.flash_attn_with_kvcache, CACHE | NEW | ROTARY, "sdpa", "CPU"),
    "experts": (fm.fused_moe, EXPERTS, "grouped_mm", "CPU"),
    "experts, no tokens": (
        fm.fused_moe,
        EXPERTS | {name: EXPERTS[name][:0] for name in ("hidden_states", "top_k_weights", "top_k_ids")},
        "grouped_mm",
        "no tokens",
    ),
    "compiled": (torch.compile(fm.flash_attn_func, backend="eager"), TOKENS_FIRST, "sdpa", "CPU"),
    "router": (fm.route, {"router_logits": torch.randn(5, 8), "top_k": 2}, "pytorch", "GPU"),
    "layer": (fm.FlashMoELayer(16, 24, 4, 2), {"hidden_states": torch.randn(5, 16)}, "pytorch", "backward"),
    "load": (fm.expert_load, {"top_k_ids": torch.tensor([[0, 1]]), "experts": 4}, "pytorch", "no kernel of ours"),
}
CASES["science"] = (fm.flash_attention_science, dict(zip("qkv", HEADS_FIRST.values(), strict=True)), "sdpa", "CPU")
CASES["forward"] = (
    fm.flash_attention_forward,
    dict(zip("QKV", HEADS_FIRST.values(), strict=True)) | {"softmax_lse": LSE, "causal": True, "softmax_scale": None},
    "sdpa",
    "CPU",
)


@pytest.mark.parametrize("case", CASES)
def test_any_function_is_explained(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, given, kernel, word = CASES[case]
    before = {name: one.clone() for name, one in given.items() if isinstance(one, torch.Tensor)}
    function(**{name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in given.items()})

    def fail(tensors: Tensors, options: Options, *rest: object) -> Any:
        raise AssertionError("it computes")

    monkeypatch.setattr(pytorch, "_plain", fail)
    monkeypatch.setattr(pytorch, "padded_attention", fail)
    for _ in range(2):
        decision = fm.explain(function, **given)
        assert decision.kernel == kernel
        assert word in decision.reason
    assert all(torch.equal(given[name], one) for name, one in before.items())


def test_without_a_function_it_is_pytorchs_signature() -> None:
    q, k, v = HEADS_FIRST.values()
    assert fm.explain(q, k, v, is_causal=True) == fm.explain(fm.scaled_dot_product_attention, q, k, v, is_causal=True)
    assert fm.explain(**HEADS_FIRST).kernel == "sdpa"
    assert fm.explain(fm.fused_moe, **EXPERTS) == fm.explain(fm.fused_moe, **EXPERTS)


def test_a_function_that_calls_ours_is_explained_by_its_first_call() -> None:
    decision = fm.explain(lambda q: fm.flash_attn_func(q, q, q) + q, TOKENS_FIRST["q"])
    assert decision.kernel == "sdpa"


@pytest.mark.parametrize("function", [len, torch.nn.functional.softmax, lambda *given: given])
def test_a_function_that_is_none_of_ours_and_calls_none_is_refused_by_name(function: Call) -> None:
    with pytest.raises(TypeError, match=r"(len|softmax|<lambda>), which is no function of flashmoe_science and calls none"):
        fm.explain(function, TOKENS_FIRST["q"], -1) if function is not len else fm.explain(len, TOKENS_FIRST["q"])


def test_what_the_call_refuses_is_refused() -> None:
    for function, given, message in (
        (fm.flash_attn_func, TOKENS_FIRST | {"causal": 1}, "causal is 1; it must be True or False"),
        (fm.flash_attn_func, TOKENS_FIRST | {"kernel": "fwd_triton"}, "kernel 'fwd_triton' cannot serve"),
        (fm.flash_attn_varlen_func, PACKED | {"cu_seqlens_q": None}, "cu_seqlens_q is None; it must be an int32 tensor"),
        (fm.flash_attn_varlen_func, PACKED | {"dropout_p": 2.0}, "dropout_p is 2.0; it must be from 0 to 1"),
        (fm.flash_attn_with_kvcache, CACHE | NEW | {"v": None}, "v is None and k is given"),
        (fm.fused_moe, EXPERTS | {"activation": "swish"}, "activation is 'swish'; it must be one of"),
        (fm.route, {"router_logits": torch.randn(5, 8), "top_k": 9}, "top_k is 9; it must be from 1 to 8"),
    ):
        for call in (function, lambda function=function, **given: fm.explain(function, **given)):
            with pytest.raises((TypeError, ValueError)) as refusal:
                call(**given)
            assert str(refusal.value).startswith(message)


def test_it_is_over_after_a_refusal() -> None:
    with pytest.raises(TypeError, match="query is a NoneType"):
        fm.explain(None, *list(HEADS_FIRST.values())[1:])
    assert isinstance(fm.scaled_dot_product_attention(**HEADS_FIRST), torch.Tensor)


def test_tiles_that_are_left_to_a_calls_lengths_are_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, kernel = gpu_named("h200"), kernel_named("fwd_gluon_sm90")
    q = torch.zeros(1, 132, 908, 128, dtype=torch.bfloat16)
    config = kernel.configs(parse_problem("attn b1 h132 q908 d128 bf16"), gpu)[0]
    plan = SimpleNamespace(decision=Decision(kernel.name, config, "", "modelled"))
    monkeypatch.setattr(operator, "plan_call", lambda *call: (plan, None))
    monkeypatch.setattr(operator, "gpu_of", lambda tensor: gpu)
    assert fm.explain(q, q, q).config["consumers"] == 3
