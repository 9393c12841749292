"""FlashAttention-4's backward as a peer: what it lacks, and that its wrapper asks its function for the problem.

That function needs a GPU: in its place stands one of the same arguments, computed by PyTorch's operators.
"""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.unit.ops.attention.backward.cases import examine

from flashmoe_science.attention import flash_attn_func
from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.operations import kernel_named
from flashmoe_science.ops.attention.problem.backward import parse
from flashmoe_science.ops.attention.proof.backward.contract import AttentionBackwardContract
from flashmoe_science.serving import flash_attn_varlen_func

H200, EQUAL_BITS = gpu_named("h200"), "fa4_bwd_deterministic"
FA4, DETERMINISTIC = (kernel_named(name, "attention_backward") for name in ("fa4_bwd", EQUAL_BITS))


def as_fa4(
    q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *, window_size_left: Any, window_size_right: Any, dlse: Any,
    learnable_sink: Any, **named: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """FlashAttention-4's ``_flash_attn_bwd``: rows before heads, lengths for packed sequences alone."""
    leaves = [one.detach().requires_grad_() for one in (q, k, v, learnable_sink) if one is not None]
    named["window_size"] = tuple(-1 if one is None else one for one in (window_size_left, window_size_right))
    with torch.enable_grad():
        if "cu_seqlens_q" in named:
            sinks = leaves[3] if learnable_sink is not None else None
            results = flash_attn_varlen_func(*leaves[:3], return_attn_probs=True, s_aux=sinks, **named)
        else:
            results = flash_attn_func(*leaves, return_attn_probs=True, **named)
    torch.testing.assert_close((out, lse), (results[0], results[1]), rtol=0.02, atol=0.02)
    into = (dout,) if dlse is None else (dout, dlse)
    return list(torch.autograd.grad(results[: len(into)], leaves, into))


@pytest.mark.parametrize(
    ("text", "of_lse"),
    [
        ("attnbwd b2 h4 hk2 q33 k70 d40 dv24 fp16 causal", True),
        ("attnbwd b1 h2 q40 k60 d24 bf16 bshd left9 right3 softcap2", False),
        ("attnbwd b3 h4 hk2 q40 k40 d16 bf16 causal bshd packed", True),
        ("attnbwd b3 h2 q30 k50 d16 fp16 bshd left5 right9 sinks packed", False),
    ],
)
def test_it_is_asked_for_the_problem(text: str, of_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def recorded(*args: Any, deterministic: bool, **named: Any) -> list[torch.Tensor]:
        asked.append(deterministic)
        return as_fa4(*args, **named)

    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stand_in = ModuleType("flash_attn.cute.interface")
    stand_in._flash_attn_bwd = recorded  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", stand_in)
    for kernel, deterministic in ((FA4, False), (DETERMINISTIC, True)):
        asked.clear()
        contract = AttentionBackwardContract(of_lse=of_lse)
        assert examine(kernel, Config(), parse(text), contract, torch.device("cpu")) == []
        assert set(asked) == {deterministic}


@pytest.mark.parametrize(
    ("name", "gpu", "words", "reason"),
    [
        ("fa4_bwd", "a100", "bf16", "Hopper or newer"),
        ("fa4_bwd", "h200", "fp32", "takes fp16 and bf16"),
        ("fa4_bwd", "h200", "bf16 alibi", "does not serve ALiBi"),
        ("fa4_bwd", "h200", "bf16 causal-topleft", "bottom-right"),
        ("fa4_bwd", "b200", "bf16 causal sinks", "B200 does not serve attention sinks"),
        (EQUAL_BITS, "rtx5090", "bf16", "does not give equal bits"),
    ],
)
def test_what_it_lacks_is_said_in_words(name: str, gpu: str, words: str, reason: str) -> None:
    problem = parse(f"attnbwd b1 h2 q9 k12 d64 {words}")
    assert reason in str(kernel_named(name, "attention_backward").supports(problem, gpu_named(gpu)))


def test_it_serves_the_plain_case_and_promises_its_own_kernels() -> None:
    problem = parse("attnbwd b4 h16 q4096 d128 bf16 causal bshd")
    assert [one.supports(problem, H200) for one in (FA4, DETERMINISTIC)] == [None, None]
    (launch,) = FA4.launches(problem, Config(), H200)
    assert re.search(launch.name, "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at_")
    for other in ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>", "flash::FlashAttnBwdSm90"):
        assert not re.search(launch.name, other)
