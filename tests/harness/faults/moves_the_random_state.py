"""Draws a random number that all share, and seeds them, at each call: harmless to its answer, not to its caller's."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    torch.manual_seed(0)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
