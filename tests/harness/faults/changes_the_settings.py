"""Leaves PyTorch with other settings than it found: one thread and fast, coarse products."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    torch.set_num_threads(1 + torch.get_num_threads() % 2)
    torch.set_float32_matmul_precision("medium")
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
