"""Reads a tile of V past its end and gives it no weight, which is not enough: 0 times NaN is NaN."""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    keys = k.shape[2]
    weights = torch.softmax((q @ k.transpose(-1, -2)) * (softmax_scale or q.shape[-1] ** -0.5), -1)
    padded = torch.empty(0, dtype=v.dtype).set_(
        v.untyped_storage(), v.storage_offset(), (*v.shape[:2], keys + 8, v.shape[3]), v.stride()
    )
    return torch.nn.functional.pad(weights, (0, 8)) @ padded
