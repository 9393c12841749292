"""Reads address 0."""

from __future__ import annotations

import ctypes

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    ctypes.string_at(0)
    return q
