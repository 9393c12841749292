"""Off by a hundredth in one element of many."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    out[0, -1, 7, 3] += 0.01
    return out
