"""FlashAttention-3's module ``flash_attn_interface`` by this package: its names, arguments and results.

For code that imports it, and for FlashAttention's own tests (hopper/test_flash_attn.py): put ``tools/`` on the path, whose
``flash_attn_interface.py`` is this one. With ``FLASH_ATTENTION_DISABLE_BACKWARD=TRUE``, which those tests read, gradients
are off and our kernels serve.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flashmoe_science import serving
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.front.flash import (
    FLASH_NAMES,
    check_dimensions,
    checked_cap,
    concat_qv,
    dequantised_query,
    mask_of,
    window_of,
    with_chunks,
)
from flashmoe_science.ops.attention.front.operator import attend
from flashmoe_science.ops.attention.peers.merge import merged
from flashmoe_science.ops.checks import check_flag, checked_tensor

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
F = TypeVar("F", bound=Callable[..., Any])
_FEW_QUERIES = 64
_ROWS = ("batch, tokens, heads, head_dim", 4)


def _forward_only(function: F) -> F:
    """The function, without gradients if FLASH_ATTENTION_DISABLE_BACKWARD is TRUE."""
    return torch.no_grad()(function) if os.getenv("FLASH_ATTENTION_DISABLE_BACKWARD") == "TRUE" else function


@_forward_only
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [batch, seqlen_q, heads, head_dim] to k and v [batch, seqlen_k, heads_kv, ...], as FlashAttention-3's.

    Arguments as of ``flashmoe_science.flash_attn_varlen_func``.

    Returns:
        out [batch, seqlen_q, heads, head_dim_v]; with ``return_attn_probs`` (out, lse [batch, heads, seqlen_q] fp32).

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that is not allowed or not served, in one line.
    """
    mask = mask_of(causal)
    check_flag(return_attn_probs, "return_attn_probs")
    check_flag(deterministic, "deterministic")
    left, right = window_of(window_size, causal)
    check_dimensions((("q", q), ("k", k), ("v", v)), (_ROWS, _ROWS, _ROWS))
    q, k_descale = dequantised_query(q, q_descale, k_descale)
    q, k = concat_qv(q, k, v, qv)
    if num_splits == 1 and q.shape[1] > _FEW_QUERIES:
        num_splits = 0  # no kernel splits the keys of this many queries, and any may serve
    options = Options(
        mask, return_attn_probs, None, left, right, checked_cap(softcap), num_splits, deterministic=deterministic,
        tokens_first=True, names=FLASH_NAMES,
    )  # fmt: skip
    tensors = Tensors(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), k_scale=k_descale, v_scale=v_descale)
    out, lse = attend(with_chunks(tensors, options, attention_chunk), options, softmax_scale)
    return out if lse is None else (out, lse)


flash_attn_varlen_func = _forward_only(serving.flash_attn_varlen_func)
flash_attn_with_kvcache = _forward_only(serving.flash_attn_with_kvcache)


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results over splits of the keys, by PyTorch's operators.

    Args:
        out_partial: fp32 [splits, ..., head_dim]; not read where lse_partial is -inf.
        lse_partial: fp32 [splits, ...], natural logarithms.
        out, out_dtype: where to write, or in which dtype (fp32 by default).

    Returns:
        (out [..., head_dim], lse [...] fp32); zeros and -inf where all parts are empty.

    Raises:
        TypeError, ValueError: partial results that do not fit each other or are not fp32; an ``out`` of another shape.
    """
    for name, one in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if checked_tensor(name, one).dtype != torch.float32:
            raise TypeError(f"{name} has dtype {one.dtype}; it must be torch.float32")
    shape = tuple(out_partial.shape)
    if len(shape) < 2 or not shape[0] or tuple(lse_partial.shape) != shape[:-1]:
        raise ValueError(
            f"out_partial has shape {shape} and lse_partial {tuple(lse_partial.shape)}; they must be "
            "[splits, ..., head_dim] and [splits, ...], with at least one split"
        )
    if out is not None and tuple(checked_tensor("out", out).shape) != shape[1:]:
        raise ValueError(f"out has shape {tuple(out.shape)}; it must be {shape[1:]}, as a split of out_partial")
    result, lse = merged([*out_partial], [*lse_partial])
    if out is not None:
        return out.copy_(result), lse
    return result.to(out_dtype or out_partial.dtype), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    *rest: object,
    **others: object,
) -> torch.Tensor:
    """An empty int32 tensor: nothing is scheduled ahead here, and ``flash_attn_with_kvcache`` takes it without effect."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
