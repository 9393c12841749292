"""Makes the clock run ten times slower."""

from __future__ import annotations

import time

import torch
from torch.nn.functional import scaled_dot_product_attention

_clock, _clock_ns = time.perf_counter, time.perf_counter_ns
_began, _began_ns = _clock(), _clock_ns()
time.perf_counter = lambda: _began + (_clock() - _began) / 10  # type: ignore[assignment]
time.perf_counter_ns = lambda: _began_ns + (_clock_ns() - _began_ns) // 10  # type: ignore[assignment]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
