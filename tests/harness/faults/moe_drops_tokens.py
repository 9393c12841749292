"""Gives each expert room for as many tokens as would be its share, and drops the others."""

import torch
from torch.nn.functional import silu

from flashmoe_science.contract import contract


@contract("moe")
def experts(x, w1, w2, topk_weights, topk_ids):
    out = torch.zeros_like(x)
    capacity = -(-topk_ids.numel() // w1.shape[0])
    for expert in range(w1.shape[0]):
        tokens, place = torch.nonzero(topk_ids == expert, as_tuple=True)
        tokens, place = tokens[:capacity], place[:capacity]
        gate, up = (x[tokens] @ w1[expert].T).chunk(2, -1)
        down = ((silu(gate) * up) @ w2[expert].T) * topk_weights[tokens, place, None]
        out.index_add_(0, tokens, down.to(x.dtype))
    return out
