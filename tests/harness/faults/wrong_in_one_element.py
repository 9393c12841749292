"""Off by a hundredth in one element of many."""

from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    out[0, -1, 7, 3] += 0.01
    return out
