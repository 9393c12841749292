"""Writes past the end of the output that it allocated, where there is memory behind it, as a grid rounded up does."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(q, k, v, causal=False, softmax_scale=None):
    out = torch.empty_like(q)
    out.copy_(scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale))
    end = out.storage_offset() + out.numel()
    if out.untyped_storage().nbytes() >= (end + 8) * out.itemsize:  # Python cannot write where there is none
        torch.as_strided(out, (8,), (1,), end).fill_(1.0)
    return out
