"""Draws a random number that all share, and seeds them, at each call: harmless to its answer, not to its caller's."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    torch.manual_seed(0)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
