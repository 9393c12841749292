"""Attention in fp64, for faults that are not about values: PyTorch's, which in fp32 misses its bound by chance at some scales;
and by its formula, with features."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    return scaled_dot_product_attention(q.double(), k.double(), v.double(), **how).to(q.dtype)


def scores(q, k, causal, softmax_scale, window_size=(-1, -1), attn_mask=None, alibi_slopes=None, softcap=0.0):
    """Masked scores."""
    rows, keys = q.shape[2], k.shape[2]
    away = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)  # of a key, behind a query
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * away.abs()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    left, right = window_size
    hidden = (away > 0) & causal | (away < -left) & (left >= 0) | (away > right) & (right >= 0)
    return scores.masked_fill(hidden, -torch.inf)


def right(q, k, v, causal, softmax_scale, sinks=None, index=None, **more):
    """Attention as its contract says it; ``index``: the key head of each query head."""
    heads, of = q.shape[1], k.shape[1]
    index = torch.arange(heads) // (heads // of) if index is None else index
    made = scores(q, k[:, index], causal, softmax_scale, **more)
    if sinks is not None:
        made = torch.cat((made, sinks.double()[:, None, None].expand(*made.shape[:-1], 1)), -1)
    weights = torch.softmax(made, -1).nan_to_num(nan=0.0)[..., : k.shape[2]]
    return (weights @ v[:, index].double()).to(q.dtype)
