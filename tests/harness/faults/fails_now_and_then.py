"""Fails in its third call, as one that runs out of a buffer of its own does, and in no other."""

from __future__ import annotations

from itertools import count

import torch
from torch.nn.functional import scaled_dot_product_attention

_CALLS = count(1)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    if next(_CALLS) == 3:
        raise RuntimeError("no buffer is free")
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
