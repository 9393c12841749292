"""Gives Q back, having written the answer over it."""

from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    return q.copy_(scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale))
