"""Uses the output of the call before as scratch memory, which its caller may still hold."""

import torch
from torch.nn.functional import scaled_dot_product_attention

_BEFORE: list[torch.Tensor] = []


def attention(q, k, v, causal=False, softmax_scale=None):
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    for before in _BEFORE:
        before.zero_()
    _BEFORE[:] = [out]
    return out
