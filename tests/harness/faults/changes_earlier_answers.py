"""Uses the output of the call before as scratch memory, which its caller may still hold."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

_BEFORE: list[torch.Tensor] = []


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    for before in _BEFORE:
        before.zero_()
    _BEFORE[:] = [out]
    return out
