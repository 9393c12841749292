"""Returns in one branch only: where no softmax scale is passed, nothing comes back."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor | None:
    if softmax_scale is not None:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    return None
