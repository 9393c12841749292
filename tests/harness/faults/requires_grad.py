"""Returns what PyTorch's autograd would follow, though no input asks for it."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale).requires_grad_()
