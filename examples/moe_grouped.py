"""A mixture of experts in plain PyTorch: tokens sorted by expert, then two matrix products for each expert that has any.

flashmoe prove examples/moe_grouped.py:experts
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from flashmoe_science.contract import contract


@contract("moe")
def experts(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """x [T, D], w1 [E, 2F, D] (gate rows, then up), w2 [E, D, F], topk_weights and topk_ids [T, K] -> [T, D]."""
    tokens, top_k = topk_ids.shape
    order = topk_ids.flatten().argsort(stable=True)
    counts = torch.bincount(topk_ids.flatten(), minlength=w1.shape[0]).tolist()
    down = torch.empty(tokens * top_k, x.shape[1], dtype=x.dtype, device=x.device)
    for expert, rows in enumerate(order.split(counts)):
        if len(rows):
            gate, up = (x[rows // top_k] @ w1[expert].T).chunk(2, -1)
            down[rows] = (silu(gate) * up) @ w2[expert].T
    return (down.view(tokens, top_k, -1) * topk_weights[:, :, None]).sum(1).to(x.dtype)
