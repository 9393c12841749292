"""A softmax that does not take the maximum off first: right on small scores, infinite on large ones."""

import torch


def attention(q, k, v, causal=False, softmax_scale=None):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    weights = torch.exp((q @ k.transpose(-1, -2)) * scale)
    if causal:
        weights = weights.tril(k.shape[2] - q.shape[2])
    return (weights / weights.sum(-1, keepdim=True)) @ v
