"""Features of the peers: what each says it lacks, and that their wrappers ask FlashAttention's functions for the problem.

FlashAttention itself needs a GPU: in its place stand functions of the same arguments, computed by PyTorch's operators.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.unit.ops.attention.held import CPU, expected_of, inputs_of, reasons

from flashmoe_science.attention import flash_attn_func
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.operations import parse_problem
from flashmoe_science.ops.attention.front.kernels import PEERS
from flashmoe_science.ops.attention.peers import fa3
from flashmoe_science.ops.attention.proof.contract import CONTRACT
from flashmoe_science.serving import flash_attn_varlen_func, flash_attn_with_kvcache

BY_NAME = {kernel.name: kernel for kernel in PEERS}
H200 = gpu_named("h200")


def result_of(name: str, text: str) -> list[str]:
    """Why the peer's result on the CPU is refused; empty where it is right."""
    inputs, kernel = inputs_of(text), BY_NAME[name]
    output = kernel.run(inputs, kernel.configs(inputs.problem, None)[0])
    tensors = CONTRACT.inputs(inputs.problem, CPU, torch.Generator().manual_seed(1))
    return reasons((output.out, output.lse), expected_of(inputs, tensors))


@pytest.mark.parametrize("name", ["sdpa", "sdpa_math"])
@pytest.mark.parametrize("words", ["boolmask", "bias", "boolmask bshd"])
def test_pytorch_takes_mask_tensors(name: str, words: str) -> None:
    text = f"attn b2 h4 hk2 q9 k20 d8 fp32 {words}"
    assert BY_NAME[name].supports(parse_problem(text), None) is None
    assert result_of(name, text) == []


def test_pytorch_is_given_a_mask_as_large_as_its_user_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A boolean one it converts: of all heads that takes three times as long as of one."""
    inputs = inputs_of("attn b2 h4 q9 k20 d8 fp32 boolmask")
    assert inputs.tensors.bias is not None
    assert inputs.tensors.bias.shape == (2, 4, 9, 20)
    given: list[torch.Size] = []

    def attend(*args: torch.Tensor, attn_mask: torch.Tensor, **more: object) -> torch.Tensor:
        given.append(attn_mask.shape)
        return args[0]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    BY_NAME["sdpa"].run(inputs, BY_NAME["sdpa"].configs(inputs.problem, None)[0])
    assert given == [(2, 1, 9, 20)]


def test_one_query_sees_every_key_and_needs_no_causal_mask() -> None:
    for name in ("sdpa", "sdpa_cudnn", "sdpa_flash"):
        assert BY_NAME[name].supports(parse_problem("attn b2 h4 hk2 q1 k20 d64 bf16 causal"), H200) is None
    assert result_of("sdpa", "attn b2 h4 hk2 q1 k20 d8 fp32 causal") == []


RAGGED = (
    "attn b3 h4 hk2 q2 k30 d8 fp32 causal bshd ragged",
    "attn b3 h4 hk2 q2 k30 d8 fp32 softcap3 ragged",
    "attn b3 h4 hk2 q9 d8 fp32 causal bshd packed",
    "attn b3 h4 hk2 q9 k30 d8 fp32 bshd packed softcap3",
    "attn b3 h4 hk2 q2 k30 d8 fp32 causal bshd ragged page8",
    "attn b3 h4 hk2 q9 k30 d8 fp32 causal bshd packed page8",
    "attn b3 h4 hk2 q2 k30 d8 fp32 causal left9 ragged page8",
    "attn b3 h4 hk2 q9 k30 d8 fp32 left9 right3 packed",
)


@pytest.mark.parametrize("text", [*RAGGED, "attn b3 h4 hk2 q2 k30 d8 fp32 causal ragged leftpad"])
def test_fa3_is_asked_for_the_problem(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("fa3_fwd_interface")
    stand_in.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    stand_in.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", stand_in)
    assert result_of("fa3", text) == []


def test_fa3_is_asked_for_dense_windows_and_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_fa3(q: Any, k: Any, v: Any, *, num_splits: int, **named: Any) -> Any:
        return flash_attn_func(q, k, v, **named)[:2]

    stand_in = ModuleType("fa3_fwd_interface")
    stand_in.flash_attn_func = as_fa3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", stand_in)
    assert result_of("fa3", "attn b2 h4 hk2 q9 k20 d8 fp32 causal left4 softcap3") == []
    assert result_of("fa3", "attn b2 h4 hk2 q9 k20 d8 fp32 left4 right2") == []


def as_fa4(q: Any, k: Any, v: Any, **named: Any) -> Any:
    """FlashAttention-4's ``flash_attn_varlen_func``: windows of None, seqused_k with or without a table."""
    window = named.pop("window_size", (None, None))
    lse = named.pop("return_lse")
    named["window_size"] = tuple(-1 if one is None else one for one in window)
    named["s_aux"] = named.pop("learnable_sink", None)
    if named["cu_seqlens_k"] is not None:
        named.pop("seqused_k"), named.pop("page_table")
        return flash_attn_varlen_func(q, k, v, return_attn_probs=lse, **named)
    named.pop("cu_seqlens_k"), named.pop("max_seqlen_k")
    return flash_attn_with_kvcache(q, k, v, cache_seqlens=named.pop("seqused_k"), return_softmax_lse=lse, **named)


@pytest.mark.parametrize("text", [*RAGGED, "attn b3 h4 hk2 q2 k30 d8 fp32 causal sinks ragged page8"])
def test_fa4_is_asked_for_the_problem(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, stand_in = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    stand_in.flash_attn_varlen_func = as_fa4  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", stand_in)
    assert result_of("fa4", text) == []


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("fwd_triton", "causal left9", "it does not serve a sliding window"),
        ("fwd_gluon_sm90", "causal ragged page16", "it does not serve a key-value cache of ragged lengths"),
        ("sdpa", "causal packed", "PyTorch's attention does not serve packed sequences"),
        ("sdpa", "causal boolmask", "PyTorch's attention takes no mask tensor beside is_causal"),
        ("sdpa_flash", "bias", "PyTorch's flash backend does not serve an additive bias"),
        ("sdpa_cudnn", "sinks", "PyTorch's attention does not serve attention sinks"),
        ("fa3", "ragged page16", "the fa3-fwd wheel is built without a paged cache"),
        ("fa3", "causal left9", "the fa3-fwd wheel is built without windows"),
        ("fa3", "ragged fp8kv", "FlashAttention-3 does not serve fp8 keys and values"),
        ("fa4", "alibi", "FlashAttention-4 does not serve ALiBi"),
        ("flex", "sinks", "FlexAttention, as it is measured here, does not serve attention sinks"),
    ],
)
def test_a_mode_that_a_kernel_lacks_is_refused_in_words(name: str, words: str, reason: str) -> None:
    from flashmoe_science.operations import kernel_named

    fa3._built_without.cache_clear()
    problem = parse_problem(f"attn b2 h4 hk2 q64 d64 bf16 {words}")
    assert kernel_named(name).supports(problem, H200) == reason  # type: ignore[arg-type]


def test_fa3_is_tried_split_where_packed_heads_leave_the_gpu_idle() -> None:
    for text, splits in (
        ("attn b8 h32 hk8 q1 k8192 d128 bf16", ["num_splits=1", "num_splits=0"]),
        ("attn b32 h32 hk8 q1 k8192 d128 bf16", ["num_splits=1"]),
        ("attn b32 h32 hk8 q1 k8192 d128 bf16 ragged", ["num_splits=1", "num_splits=0"]),
    ):
        assert [str(config) for config in BY_NAME["fa3"].configs(parse_problem(text), H200)] == splits
