"""Never returns."""

from __future__ import annotations

import time

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    while True:
        time.sleep(1)
