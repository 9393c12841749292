"""FlashAttention-2's functions of packed tensors: keys and values, or queries too, in one tensor.

Arguments and results are FlashAttention-2's. Each calls ``flash_attn_func`` or ``flash_attn_varlen_func`` with views.
"""

from __future__ import annotations

import torch

from flashmoe_science import serving
from flashmoe_science.attention import flash_attn_func
from flashmoe_science.ops.checks import checked_tensor

__all__ = [
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]
_Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
) -> _Result:
    """``flash_attn_func`` of queries, keys and values in one tensor, which is not copied.

    Args:
        qkv: [batch, seqlen, 3, heads, head_dim]. The others as of ``flash_attn_func``.

    Returns:
        As that function's; with ``return_attn_probs`` (out, lse, the weights of ``flash_attn_func``).

    Raises:
        TypeError, ValueError: what it refuses, or another shape.
    """
    q, k, v = _checked("qkv", qkv, ("batch", "seqlen", "3", "heads", "head_dim")).unbind(-3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options, kernel=kernel)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
) -> _Result:
    """``flash_attn_func`` of keys and values in one tensor, which is not copied.

    Args:
        q: [batch, seqlen_q, heads, head_dim]. kv: [batch, seqlen_k, 2, heads_kv, head_dim].
            The others as of ``flash_attn_func``.

    Returns:
        As that function's; with ``return_attn_probs`` (out, lse, the weights of ``flash_attn_func``).

    Raises:
        TypeError, ValueError: what it refuses, or another shape.
    """
    k, v = _checked("kv", kv, ("batch", "seqlen", "2", "heads_kv", "head_dim")).unbind(-3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options, kernel=kernel)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
) -> _Result:
    """``flash_attn_varlen_func`` of queries, keys and values in one tensor, which is not copied.

    Args:
        qkv: [total, 3, heads, head_dim]. The others as of ``flash_attn_varlen_func``.

    Returns:
        As that function's; with ``return_attn_probs`` (out, lse, the weights of ``flash_attn_func``).

    Raises:
        TypeError, ValueError: what it refuses, or another shape.
    """
    q, k, v = _checked("qkv", qkv, ("total", "3", "heads", "head_dim")).unbind(-3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options, kernel=kernel)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    kernel: str | None = None,
) -> _Result:
    """``flash_attn_varlen_func`` of keys and values in one tensor, which is not copied.

    Args:
        q: [total_q, heads, head_dim]. kv: [total_k, 2, heads_kv, head_dim]. The others as of ``flash_attn_varlen_func``.

    Returns:
        As that function's; with ``return_attn_probs`` (out, lse, the weights of ``flash_attn_func``).

    Raises:
        TypeError, ValueError: what it refuses, or another shape.
    """
    k, v = _checked("kv", kv, ("total_k", "2", "heads_kv", "head_dim")).unbind(-3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options, kernel=kernel)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    kernel: str | None = None,
) -> _Result:
    """``flashmoe_science.flash_attn_varlen_func`` with FlashAttention-2's order of arguments.

    Returns:
        As that function's; with ``return_attn_probs`` (out, lse, the weights of ``flash_attn_func``).
    """
    result = serving.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, deterministic=deterministic, return_attn_probs=return_attn_probs,
        block_table=block_table, alibi_slopes=alibi_slopes, dropout_p=dropout_p, kernel=kernel,
    )  # fmt: skip
    if isinstance(result, torch.Tensor):
        return result
    out, lse, *weights = result
    return out, lse, weights[0] if weights else None


def _checked(name: str, packed: object, sizes: tuple[str, ...]) -> torch.Tensor:
    """The packed tensor. Raises TypeError, ValueError unless it has this rank, and the number among the sizes."""
    tensor = checked_tensor(name, packed)
    if tensor.dim() != len(sizes) or tensor.shape[-3] != int(sizes[-3]):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [{', '.join(sizes)}]")
    return tensor
