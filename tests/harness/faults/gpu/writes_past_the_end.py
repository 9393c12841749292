"""A grid rounded up and a store without a mask: rows past the last are written where the output has ended."""

from base import attend


def attention(q, k, v, causal=False, softmax_scale=None):
    return attend(q, k, v, causal, softmax_scale, mask_store=False)
