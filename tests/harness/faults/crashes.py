"""Reads address 0."""

import ctypes


def attention(q, k, v, causal=False, softmax_scale=None):
    ctypes.string_at(0)
    return q
