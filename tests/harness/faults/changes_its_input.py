"""Scales V where it lies."""

from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    v.mul_(1.0001)
    return out
