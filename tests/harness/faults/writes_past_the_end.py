"""Writes past the end of a tensor that it was given, as a tile without a mask does."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    past = torch.empty(0, dtype=v.dtype, device=v.device)
    past.set_(v.untyped_storage(), v.storage_offset() + v.numel(), (8,))
    past.fill_(1.0)
    return out
