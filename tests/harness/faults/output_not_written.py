"""Leaves the last rows of its output unwritten, as a grid that is rounded down does."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    out = torch.empty_like(q)
    rows = q.shape[2] // 16 * 16
    out[:, :, :rows] = (scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale))[:, :, :rows]
    return out
