"""The documents' third failure: a tile that does not fit shared memory."""

from __future__ import annotations

import torch
from base import attend


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    return attend(q, k, v, causal, softmax_scale, block=(64, 256), stages=6)
