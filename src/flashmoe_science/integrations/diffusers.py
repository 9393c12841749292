"""The attention of Hugging Face diffusers' models by our kernels: the backend "fms".

    from flashmoe_science.integrations.diffusers import register

    register()
    pipeline.transformer.set_attention_backend("fms")  # or: with attention_backend("fms"):

diffusers' names of backends are a closed enumeration; ``register`` adds a member to it. Its registry is experimental.
"""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.attention import scaled_dot_product_attention

NAME = "fms"


def register() -> None:
    """Register the attention backend "fms" with diffusers. A second call changes nothing.

    Raises:
        ImportError: diffusers is not installed, or its registry is not where 0.42 has it.
    """
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise ImportError(f"the attention backend {NAME!r} needs diffusers (0.42 was tried): pip install diffusers") from error
    _AttentionBackendRegistry.register(_member(AttentionBackendName))(attention)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor:
    """Attention of [batch, length, heads, head_dim] tensors, in that shape; diffusers calls it by keyword.

    Args:
        attn_mask: boolean or added to the scores, broadcasting to [batch, heads, queries, keys]; or [batch, keys].
        is_causal: query i sees keys 0 to i.

    Raises:
        ValueError: a log-sum-exp or context parallelism, which are not served, is asked for.
        TypeError, ValueError: what ``scaled_dot_product_attention`` refuses.
    """
    if return_lse or _parallel_config is not None:
        what = "return_lse=True" if return_lse else "context parallelism"
        raise ValueError(f"the attention backend {NAME!r} does not serve {what}; 'native' or '_native_cudnn' may")
    if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (one.transpose(1, 2) for one in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)


def _member(names: Any) -> Any:
    """Add the member "fms" to diffusers' enumeration of strings, and return it."""
    if (member := names._value2member_map_.get(NAME)) is not None:
        return member
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[NAME] = member
    return member
