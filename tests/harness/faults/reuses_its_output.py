"""Returns the same memory at every call, so that a caller's earlier answer changes."""

import torch
from torch.nn.functional import scaled_dot_product_attention

_OUT: dict[torch.Size, torch.Tensor] = {}


def attention(q, k, v, causal=False, softmax_scale=None):
    if q.shape not in _OUT:
        _OUT[q.shape] = torch.empty_like(q)
    return _OUT[q.shape].copy_(scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale))
