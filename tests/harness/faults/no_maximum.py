"""A softmax that does not take the maximum off first: right on small scores, infinite on large ones."""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    weights = torch.exp((q @ k.transpose(-1, -2)) * scale)
    if causal:
        weights = weights.tril(k.shape[2] - q.shape[2])
    return (weights / weights.sum(-1, keepdim=True)) @ v
