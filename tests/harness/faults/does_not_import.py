"""An extension that was built against another PyTorch: it fails at import, not when it is timed."""

from __future__ import annotations

import torch

raise ImportError("flash_ext.so: undefined symbol: _ZN2at4_ops9empty_like4callERKNS_6TensorE")


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    return q
