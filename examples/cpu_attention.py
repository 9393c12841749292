"""Attention in a few lines of PyTorch, for a machine without a GPU: it is timed on the CPU, for real.

flashmoe prove examples/cpu_attention.py:attention --against sdpa
"""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    """q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] -> [B, H, Sq, Dv]; the last query sees the last key."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q.float() @ k.float().transpose(-1, -2) * scale  # rounded to 16 bits, large scores would lose the softmax
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(k.shape[-2] - q.shape[-2] + 1), -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(nan=0.0)  # nan: a query that sees no key
    return (weights @ v.float()).to(q.dtype)
