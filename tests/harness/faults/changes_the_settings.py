"""Leaves PyTorch with other settings than it found: one thread and fast, coarse products."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    torch.set_num_threads(1 + torch.get_num_threads() % 2)
    torch.set_float32_matmul_precision("medium")
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
