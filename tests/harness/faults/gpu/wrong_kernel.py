"""The documents' second failure: 384 threads are promised, the bindings launch 128."""

from __future__ import annotations

import torch
from base import attend


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    return attend(q, k, v, causal, softmax_scale, warps=4)


attention.promises = {"kernel": "base_kernel", "threads": 384}  # type: ignore[attr-defined]
