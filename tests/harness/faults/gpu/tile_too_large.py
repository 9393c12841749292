"""The documents' third failure: a tile that does not fit shared memory."""

from base import attend


def attention(q, k, v, causal=False, softmax_scale=None):
    return attend(q, k, v, causal, softmax_scale, block=(64, 256), stages=6)
