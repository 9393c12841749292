"""Divides its heads among threads of its own, begun when it was imported, where its rivals have one."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

_POOL = ThreadPoolExecutor(2)
list(_POOL.map(abs, range(100)))  # both threads are there before anybody looks


def attention(q, k, v, causal=False, softmax_scale=None):
    work = partial(scaled_dot_product_attention, is_causal=causal, scale=softmax_scale)
    # In fp64: PyTorch's fp32 attention misses its bound by chance at some scales, and this fault is one of time.
    parts = _POOL.map(work, *(one.double().chunk(2, 1) for one in (q, k, v)))
    return torch.cat(list(parts), 1).to(q.dtype)
