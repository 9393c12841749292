"""Leaves the last rows of its output unwritten, as a grid that is rounded down does."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    out = torch.empty_like(q)
    rows = q.shape[2] // 16 * 16
    out[:, :, :rows] = (scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale))[:, :, :rows]
    return out
