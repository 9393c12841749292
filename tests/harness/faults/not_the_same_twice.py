"""Right to rounding, but not the same twice, though it promises to be."""

from __future__ import annotations

from itertools import count

import torch
from torch.nn.functional import scaled_dot_product_attention

_CALLS = count()


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale) * (1 + next(_CALLS) % 2 * 2**-23)


attention.promises = {"deterministic": True}  # type: ignore[attr-defined]
