"""Faults of a mixture of experts."""

import torch
from torch.nn.functional import silu

from flashmoe_science.contract import contract


def _mixture(x, w1, w2, topk_weights, topk_ids, room=None, swapped=False):
    """The mixture [tokens, hidden], of the first ``room`` tokens of each expert, gate and factor ``swapped`` or not."""
    out = torch.zeros_like(x)
    for expert in range(w1.shape[0]):
        tokens, place = (found[:room] for found in torch.nonzero(topk_ids == expert, as_tuple=True))
        gate, up = (x[tokens] @ w1[expert].T).chunk(2, -1)
        gate, up = (up, gate) if swapped else (gate, up)
        down = ((silu(gate) * up) @ w2[expert].T) * topk_weights[tokens, place, None]
        out.index_add_(0, tokens, down.to(x.dtype))
    return out


@contract("moe")
def moe_drops_tokens(x, w1, w2, topk_weights, topk_ids):
    """Gives each expert room for as many tokens as would be its share, and drops the others."""
    return _mixture(x, w1, w2, topk_weights, topk_ids, room=-(-topk_ids.numel() // w1.shape[0]))


@contract("moe")
def moe_room_for_few(x, w1, w2, topk_weights, topk_ids):
    """Has room for twice the tokens that an expert has on average, and drops what is more: right until all choose the same."""
    return _mixture(x, w1, w2, topk_weights, topk_ids, room=2 * topk_ids.numel() // w1.shape[0])


@contract("moe")
def moe_swaps_gate_and_up(x, w1, w2, topk_weights, topk_ids):
    """Takes the first half of w1 for the factor and the second for the gate."""
    return _mixture(x, w1, w2, topk_weights, topk_ids, swapped=True)
