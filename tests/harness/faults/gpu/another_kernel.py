"""Promises a kernel of its own and calls PyTorch's."""

import torch


def attention(q, k, v, causal=False, softmax_scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)


attention.promises = {"kernel": "warp_specialised_attention", "threads": 384}  # type: ignore[attr-defined]
