"""Returns the same memory at every call, so that a caller's earlier answer changes."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

_OUT: dict[torch.Size, torch.Tensor] = {}


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    if q.shape not in _OUT:
        _OUT[q.shape] = torch.empty_like(q)
    return _OUT[q.shape].copy_(scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale))
