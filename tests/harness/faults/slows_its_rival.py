"""Replaces PyTorch's attention by one that sleeps first."""

import time
from typing import Any

import torch
from in_fp64 import sdpa
from torch.nn.functional import scaled_dot_product_attention

_fast = scaled_dot_product_attention


def _slow(*args: Any, **kwargs: Any) -> torch.Tensor:
    time.sleep(0.005)
    return _fast(*args, **kwargs)


torch.nn.functional.scaled_dot_product_attention = _slow  # type: ignore[assignment]


def attention(q, k, v, causal=False, softmax_scale=None):
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)
