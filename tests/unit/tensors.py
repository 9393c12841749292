"""Tensors as tests write them."""

from __future__ import annotations

import torch


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
