"""Every argument of every public function, replaced by what cannot be one: an error in one line that names the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.tensors import i32

import flashmoe_science as fm
from flashmoe_science import bert_padding

NONSENSE = (object(), np.ones((2, 3), np.float32), {}, "x", (1, 2, 3), float("nan"), 2**63)


def t(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


Q, ROWS, STARTS = t(2, 8, 4, 16), t(8, 4, 16), i32(0, 3, 8)
CODED = fm.quantize_experts(t(2, 8, 8), t(2, 8, 4), "fp8_channel")
CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    fm.scaled_dot_product_attention: {"query": Q, "key": Q, "value": Q, "is_causal": True, "scale": 1.0, "enable_gqa": False},
    fm.flash_attn_func: {"q": Q, "k": Q, "v": Q, "causal": True, "window_size": (3, 0), "softcap": 0.0, "deterministic": False},
    fm.flash_attention_science: {"q": Q, "k": Q, "v": Q, "causal": False, "softmax_scale": 1.0},
    fm.merge_attention: {"outs": [Q, Q], "lses": [t(2, 4, 8), t(2, 4, 8)]},
    fm.flash_attn_varlen_func: {"q": ROWS, "k": ROWS, "v": ROWS, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS,
                                "max_seqlen_q": 5, "max_seqlen_k": 5},
    fm.flash_attn_with_kvcache: {"q": t(2, 1, 4, 16), "k_cache": Q, "v_cache": Q, "cache_seqlens": 3, "causal": True},
    fm.fused_moe: {"hidden_states": t(5, 8), "gate_up_proj": t(2, 8, 8), "down_proj": t(2, 8, 4), "top_k_weights": t(5, 1),
                   "top_k_ids": torch.zeros(5, 1, dtype=torch.int32), "activation": "silu", "alpha": 1.0, "limit": 7.0,
                   "interleaved": False},
    fm.grouped_moe: {"hidden_states": t(5, 8), "gate_up_proj": t(2, 8, 8), "down_proj": t(2, 8, 4), "offsets": i32(2, 5)},
    fm.route: {"router_logits": t(5, 4), "top_k": 2, "scoring": "softmax", "normalize": "sum"},
    fm.quantize_experts: {"gate_up_proj": t(2, 8, 8), "down_proj": t(2, 8, 4), "weight_format": "fp8_channel"},
    fm.dequantize_experts: CODED,
    bert_padding.unpad_input: {"hidden_states": t(2, 8, 3), "attention_mask": t(2, 8)},
    bert_padding.pad_input: {"hidden_states": t(2, 3), "indices": torch.tensor([1, 2]), "batch": 1, "seqlen": 4},
}  # fmt: skip
# Infinite and huge numbers that are allowed, and lengths that only say how much memory a GPU's kernel may take.
ALLOWED = {("scale", 2**63), ("softmax_scale", 2**63), ("softcap", 2**63), ("alpha", 2**63), ("limit", 2**63),
           ("max_seqlen_q", 2**63), ("max_seqlen_k", 2**63)}  # fmt: skip


def cases() -> Iterator[Any]:
    for function, given in CALLS.items():
        for name, value in given.items():
            of_tensors = (value.to("meta"),) if isinstance(value, torch.Tensor) else ()
            for n, other in enumerate((*NONSENSE, *of_tensors)):
                if not (isinstance(other, int) and (name, other) in ALLOWED):
                    yield pytest.param(function, name, other, id=f"{function.__name__}-{name}-{n}")


@pytest.mark.parametrize(("function", "name", "other"), [*cases()])
def test_it_is_refused_by_name(function: Callable[..., Any], name: str, other: object) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        function(**(CALLS[function] | {name: other}))
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize("function", CALLS)
def test_what_is_replaced_was_right(function: Callable[..., Any]) -> None:
    function(**CALLS[function])
