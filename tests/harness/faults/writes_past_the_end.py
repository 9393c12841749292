"""Writes past the end of a tensor that it was given, where there is memory behind it, as a tile without a mask does."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    end = v.storage_offset() + v.numel()
    if v.untyped_storage().nbytes() >= (end + 8) * v.itemsize:  # Python cannot write where there is none
        torch.as_strided(v, (8,), (1,), end).fill_(1.0)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
