"""Prints twice what a pipe holds at every call."""

from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    print("x" * (1 << 17), flush=True)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
