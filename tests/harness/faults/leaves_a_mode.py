"""Leaves a mode of PyTorch's behind that sees all that is done with tensors from then on."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class _Listens(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    _Listens().__enter__()
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
