"""Fails in its third call, as one that runs out of a buffer of its own does, and in no other."""

from itertools import count

from torch.nn.functional import scaled_dot_product_attention

_CALLS = count(1)


def attention(q, k, v, causal=False, softmax_scale=None):
    if next(_CALLS) == 3:
        raise RuntimeError("no buffer is free")
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
