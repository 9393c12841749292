"""Tiles of 48 query rows laid out as if they were 64: it builds, runs and is wrong."""

from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    for first in range(0, q.shape[2], 64):
        out[:, :, first + 48 : first + 64] = out[:, :, first : first + 16][:, :, : max(0, q.shape[2] - first - 48)]
    return out
