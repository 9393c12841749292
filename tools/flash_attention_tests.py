"""A plugin for pytest that runs FlashAttention's own tests on this package's functions, and counts what comes of them.

    PYTHONPATH=tools pytest -p flash_attention_tests -n 12 --flash-attention CLONE --counts FILE CLONE/tests/test_flash_attn.py

CLONE is one of its repository. Other files, one at a time: of hopper/ test_flash_attn.py, test_flash_attn_bwd_determinism.py,
test_torch_compile_and_export.py and test_attn_kvcache.py; with --noconftest of tests/cute/ test_flash_attn.py,
test_flash_attn_fast.py, test_flash_attn_varlen.py and test_flash_attn_race_condition.py. Of each test function a sample of its
parameters is run, drawn at random. The references and the rotary embedding are theirs. Their private backwards are the
gradients of our public functions, whose forward is computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import flashmoe_science
import flashmoe_science.bert_padding
from flashmoe_science.integrations import flash_attn, flash_attn_interface

pytest_plugins = ["upstream_tests"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flash-attention", type=Path, required=True, help="a clone of its repository")


# Our functions in the place of FlashAttention's ------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Put our functions under the names that the tests import."""
    clone = config.getoption("--flash-attention") / "flash_attn"
    two, three = ({one: getattr(module, one) for one in module.__all__} for module in (flash_attn, flash_attn_interface))
    four = {"flash_attn_func": _dense_4, "flash_attn_varlen_func": _packed_4, "get_scheduler_metadata": _Private}
    four |= {"flash_attn_combine": _private, "_flash_attn_fwd": _forward_4, "_flash_attn_bwd": _backward_4}
    four |= {"_flash_attn_bwd_sparse_mla": _private}
    _module("flash_attn", two).__path__ = [str(clone)]  # where layers.rotary is found
    _module("flash_attn.cute", four).__path__ = [str(clone / "cute")]  # and testing
    _module("flash_attn.cute.cache_utils", {"JITCache": _private})
    _module("flash_attn.cute.interface", four)
    sys.modules["flash_attn.bert_padding"] = flashmoe_science.bert_padding
    _module("flash_attn.flash_attn_interface", two | {"USE_TRITON_ROCM": False, "_get_block_size_n": None})
    three |= {"flash_attn_with_kvcache": _of_earlier_names, "_flash_attn_backward": _backward_3}
    _module("flash_attn_interface", three)


def _module(name: str, names: dict[str, Any]) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(names)
    return module


def _private(*_: object, **__: object) -> None:
    raise ImportError("a private name of FlashAttention-4's is called")


class _Private:
    """What FlashAttention-4's ``get_scheduler_metadata`` returns, which our functions leave unread."""

    def __init__(self, **_: object) -> None: ...

    def __getattr__(self, name: str) -> None:
        raise ImportError(f"{name} of the private metadata of FlashAttention-4's scheduler is read")


def _of_earlier_names(q: Any, k_cache: Any, v_cache: Any, *arguments: Any, **options: Any) -> Any:
    """``flash_attn_with_kvcache``, of arguments that hopper/test_attn_kvcache.py gives and FlashAttention-3 has renamed too."""
    options.pop("max_seqlen_k_hint", None)
    if "gqa_parallel" in options:
        options["pack_gqa"] = options.pop("gqa_parallel")
    for name in "qkv":
        if (scale := options.pop(f"descale_{name}", None)) is not None:
            options[f"{name}_descale"] = scale.expand(q.shape[0], k_cache.shape[2])
    return flash_attn_interface.flash_attn_with_kvcache(q, k_cache, v_cache, *arguments, **options)


def _of_4(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, log-sum-exp or None) of a function of FlashAttention-3, given FlashAttention-4's options."""
    for name in ("min_seqlen_k", "scheduler_metadata", "disable_scheduler_metadata", "seqlen_k_per_split"):
        options.pop(name, None)  # without effect on results
    if any(size is not None and size < 0 for size in options.get("window_size", ())):
        raise NotImplementedError(
            f"window_size is {options['window_size']}; below 0 is no limit, as of FlashAttention-2 and -3"
        )
    with_lse = options.pop("return_lse", False)
    result = function(*arguments, return_attn_probs=with_lse, **options)
    return result if with_lse else (result, None)


def _dense_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, learnable_sink: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FlashAttention-4's ``flash_attn_func``."""
    if learnable_sink is not None:
        return _packed_4(q, k, v, learnable_sink=learnable_sink, **options)
    return _of_4(flash_attn_interface.flash_attn_func, q, k, v, **options)


def _packed_4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FlashAttention-4's ``flash_attn_varlen_func``, which takes [batch, seqlen, heads, head_dim] too."""
    shape, max_seqlen_k = q.shape[:-2], max_seqlen_k or (k.shape[0] if page_table is None else page_table.shape[1]) * k.shape[1]
    if len(shape) == 2:
        cu_seqlens_q, max_seqlen_q, q, qv = _starts(q), shape[1], q.flatten(0, 1), None if qv is None else qv.flatten(0, 1)
    if k.dim() == 4 and page_table is None:
        cu_seqlens_k, max_seqlen_k, k, v = _starts(k), k.shape[1], k.flatten(0, 1), v.flatten(0, 1)
    out, lse = _of_4(
        flashmoe_science.flash_attn_varlen_func, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q or shape[0], max_seqlen_k,
        block_table=page_table, s_aux=learnable_sink, qv=qv, **options,
    )  # fmt: skip
    return out.unflatten(0, shape), None if lse is None else lse.unflatten(1, shape).movedim(0, -2)


def _starts(dense: torch.Tensor) -> torch.Tensor:
    return torch.arange(dense.shape[0] + 1, device=dense.device, dtype=torch.int32) * dense.shape[1]


def _forward_4(
    *tensors: Any, window_size_left: int | None = None, window_size_right: int | None = None, **options: Any
) -> tuple[torch.Tensor | None, ...]:
    """FlashAttention-4's ``_flash_attn_fwd``."""
    function = _dense_4 if options.get("cu_seqlens_q") is options.get("page_table") is None else _packed_4
    return *function(*tensors, window_size=(window_size_left, window_size_right), **options), None, None


def _backward_4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    *,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """FlashAttention-4's ``_flash_attn_bwd``."""
    made = _gradients(_forward_4, (q, k, v), dout, **options)
    return tuple(one if into is None else into.copy_(one) for one, into in zip(made, (dq, dk, dv), strict=True))


def _backward_3(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *rest: Any,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """FlashAttention-3's ``_flash_attn_backward``, with the window of its test of determinism."""
    cu_q, cu_k, used_q, used_k, max_q, max_k, _, _, _, scale, causal = rest
    options |= {"softmax_scale": scale, "causal": causal}
    if cu_q is None:
        return *_gradients(flash_attn_interface.flash_attn_func, (q, k, v), dout, **options), None
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    options |= packed | {"seqused_q": used_q, "seqused_k": used_k}
    return *_gradients(flash_attn_interface.flash_attn_varlen_func, (q, k, v), dout, **options), None


def _gradients(
    function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], dout: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in tensors]
        result = function(*leaves, **options)
    return torch.autograd.grad(result if isinstance(result, torch.Tensor) else result[0], leaves, dout)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests of dropout take our weights as they are: FlashAttention-2's lack factors of their blocks of keys."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        module.normalize_flash_attn_S = lambda weights, *_, **__: weights
