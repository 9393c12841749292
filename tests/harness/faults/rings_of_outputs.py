"""Returns the memory of eight outputs in turn, so that the ninth call changes the first answer."""

from itertools import count

import torch
from torch.nn.functional import scaled_dot_product_attention

_RING: list[torch.Tensor] = []
_CALLS = count()


def attention(q, k, v, causal=False, softmax_scale=None):
    if not _RING or _RING[0].shape != q.shape:
        _RING[:] = [torch.empty(q.shape, dtype=q.dtype) for _ in range(8)]
    return _RING[next(_CALLS) % 8].copy_(scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale))
