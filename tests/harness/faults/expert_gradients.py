"""Faults of the experts' backward: the output is right, its gradients are not."""

import torch
from gradients import Read
from torch.nn.functional import silu

from flashmoe_science.contract import contract

_CALLS = [0]
_SAVED: list[torch.Tensor] = []


def _mixture(x, w1, w2, topk_weights, topk_ids, twice=False):
    """The layer, an expert at a time. ``twice``: its rows have the gradient of their weights times the weights."""
    out = torch.zeros_like(x)
    for expert in range(w1.shape[0]):
        tokens, place = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate, up = (x[tokens] @ w1[expert].T).chunk(2, -1)
        row, weight = (silu(gate) * up) @ w2[expert].T, topk_weights[tokens, place, None].to(x.dtype)
        if twice:
            row = row.detach() + weight.detach() * (row - row.detach())
        out = out.index_add(0, tokens, row * weight)
    return out


class _OfThoseWithTokens(torch.autograd.Function):
    """Weights, of whose gradient only the part of experts with tokens is written."""

    @staticmethod
    def forward(ctx, weights, topk_ids):
        ctx.ids = topk_ids
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, gradient):
        made = torch.empty_like(gradient)
        for expert in ctx.ids.unique().tolist():
            if 0 <= expert < len(made):
                made[expert] = gradient[expert]
        return made, None


@contract("moe_backward")
def expert_gradient_not_written(x, w1, w2, topk_weights, topk_ids):
    """Leaves dW of an expert without tokens as it was allocated."""
    w1, w2 = (_OfThoseWithTokens.apply(one, topk_ids) for one in (w1, w2))
    return _mixture(x, w1, w2, topk_weights, topk_ids)


@contract("moe_backward")
def expert_gradient_without_the_router(x, w1, w2, topk_weights, topk_ids):
    """Gives no gradient to the routing weights: the router never learns."""
    return _mixture(x, w1, w2, topk_weights.detach(), topk_ids)


@contract("moe_backward")
def expert_gradient_weighted_twice(x, w1, w2, topk_weights, topk_ids):
    """Multiplies by the routing weights before the backward of an expert and in its epilogue."""
    return _mixture(x, w1, w2, topk_weights, topk_ids, twice=True)


@contract("moe_backward")
def expert_gradient_in_another_order(x, w1, w2, topk_weights, topk_ids):
    """Promises the same bits, and rounds dW1 otherwise in each call, as atomic adds do."""
    _CALLS[0] += 1
    w1 = w1 * 1.0
    w1.register_hook(lambda gradient: gradient * (1.0 + 2.0**-23 * (_CALLS[0] % 2)))
    return _mixture(x, w1, w2, topk_weights, topk_ids)


expert_gradient_in_another_order.promises = {"deterministic": True}


@contract("moe_backward")
def expert_gradient_of_other_ranks(x, w1, w2, topk_weights, topk_ids):
    """Adds what tokens would give to an expert of another rank to the gradients of the last one here."""
    right = _mixture(x, w1, w2, topk_weights, topk_ids)
    foreign = torch.where(topk_ids < 0, w1.shape[0] - 1, -1)
    theirs = _mixture(x, w1, w2, topk_weights, foreign)
    return right + (theirs - theirs.detach())


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given):
        _SAVED[:], ctx.ids = given[:4], given[4]
        return _mixture(*given)

    @staticmethod
    def backward(ctx, dout):
        leaves = [one.detach().requires_grad_() for one in _SAVED]
        with torch.enable_grad():
            out = _mixture(*leaves, ctx.ids)
        return *torch.autograd.grad(out, leaves, dout), None


@contract("moe_backward")
def expert_gradient_of_the_last_forward(x, w1, w2, topk_weights, topk_ids):
    """Keeps what it saves in one place for all calls: a second layer overwrites the first one's."""
    return _Saving.apply(x, w1, w2, topk_weights, topk_ids)


@contract("moe_backward")
def expert_gradient_read_in_a_row(x, w1, w2, topk_weights, topk_ids):
    """Takes the gradient into its result to be contiguous."""

    def read(gradient):
        dense = gradient.numel() == gradient.untyped_storage().nbytes() // gradient.element_size()
        return gradient.as_strided(gradient.shape, (gradient.shape[1], 1)) if dense else gradient

    return Read.apply(_mixture(x, w1, w2, topk_weights, topk_ids), read)


@contract("moe_backward")
def expert_gradients_summed_in_16_bits(x, w1, w2, topk_weights, topk_ids):
    """Takes 64 tokens at a time: what they give to dW1 and dW2 is added in their dtype."""
    parts = zip(x.split(64), topk_weights.split(64), topk_ids.split(64), strict=True)
    return torch.cat([_mixture(rows, w1, w2, weights, ids) for rows, weights, ids in parts])


@contract("moe_backward")
def output_of_other_experts(x, w1, w2, topk_weights, topk_ids):
    """Has the gradients of the layer, and an output that is not it."""
    return _mixture(x, w1, w2, topk_weights, topk_ids) + 0.5


@contract("moe_backward")
def expert_gradient_without_gaps(x, w1, w2, topk_weights, topk_ids):
    """Takes the gradient's rows to fill its memory: not of a slice."""

    def read(gradient):
        has_gaps = gradient.stride(1) == 1 and gradient.stride(0) > gradient.shape[1]
        return gradient.as_strided(gradient.shape, (gradient.shape[1], 1)) if has_gaps else gradient

    return Read.apply(_mixture(x, w1, w2, topk_weights, topk_ids), read)
