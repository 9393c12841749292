"""Writes past the end of the output that it allocated, where there is memory behind it, as a grid rounded up does."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    out = torch.empty_like(q)
    out.copy_(scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale))
    end = out.storage_offset() + out.numel()
    if out.untyped_storage().nbytes() >= (end + 8) * out.itemsize:  # Python cannot write where there is none
        torch.as_strided(out, (8,), (1,), end).fill_(1.0)
    return out
