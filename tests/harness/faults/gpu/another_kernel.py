"""Promises a kernel of its own and calls PyTorch's."""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)


attention.promises = {"kernel": "warp_specialised_attention", "threads": 384}  # type: ignore[attr-defined]
