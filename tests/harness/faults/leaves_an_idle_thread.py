"""Leaves a thread behind that waits, as PyTorch's compiler does: no fault."""

from __future__ import annotations

import threading

import torch
from torch.nn.functional import scaled_dot_product_attention

_WAITS: list[threading.Thread] = []


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    if not _WAITS:
        _WAITS.append(threading.Thread(target=threading.Event().wait, daemon=True))
        _WAITS[0].start()
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
