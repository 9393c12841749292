"""How an output lies in memory. Apart from launch.py because the operator needs it where Triton is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def output_strides(q: torch.Tensor, width: int) -> tuple[int, int, int, int]:
    """Strides of a dense [batch, heads, seqlen_q, width] output in the memory order of ``q``: [B, S, H, D] stays so."""
    _, heads, rows, _ = q.shape
    if q.stride(1) < q.stride(2):
        return (rows * heads * width, width, heads * width, 1)
    return (heads * rows * width, rows * width, width, 1)
