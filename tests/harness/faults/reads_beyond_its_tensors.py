"""Reads V past its end, where there is memory behind it, and gives that no weight: not enough, as 0 times NaN is NaN."""

import torch


def attention(q, k, v, causal=False, softmax_scale=None):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (q @ k.transpose(-1, -2)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    weights, tile = torch.softmax(scores, -1), 8
    end = v.storage_offset() + v.numel() + tile * v.stride(2)
    if v.untyped_storage().nbytes() >= end * v.itemsize:  # Python cannot read where there is none
        v = torch.as_strided(v, (*v.shape[:2], v.shape[2] + tile, v.shape[3]), v.stride(), v.storage_offset())
        weights = torch.nn.functional.pad(weights, (0, tile))
    return weights @ v
