"""Gradients of experts computed to be right, not fast: autograd of one expert at a time, in fp64 or the input dtype."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.ops.moe.call import Activation, Tensors
from flashmoe_science.ops.moe.proof.oracle import assigned
from flashmoe_science.ops.moe.pytorch import activate
from flashmoe_science.ops.plain import without_tf32


def gradients_oracle(tensors: Tensors, activation: Activation, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of x, w1, w2, the routing weights and the biases that there are, in fp64."""
    return _gradients(tensors, activation, dout, torch.float64)


@without_tf32()
def gradients_plain(tensors: Tensors, activation: Activation, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same in the dtype of x, each step rounded to it; an expert's part of dx is added in fp32."""
    made = _gradients(tensors, activation, dout, tensors.x.dtype)
    return tuple(one.to(like.dtype) for one, like in zip(made, _differentiated(tensors), strict=True))


def routing_gradient(logits: torch.Tensor, topk_ids: torch.Tensor, dweights: torch.Tensor) -> torch.Tensor:
    """The gradient of router logits through the softmax over all experts, renormalised over the chosen."""
    logits = logits.detach().requires_grad_()
    with torch.enable_grad():
        chosen = torch.softmax(logits, -1).gather(-1, topk_ids.long())
        weights = chosen / chosen.sum(-1, keepdim=True)
    (made,) = torch.autograd.grad(weights, logits, dweights.to(logits.dtype))
    return made


def routing_mass(tensors: Tensors, activation: Activation, dout: torch.Tensor) -> torch.Tensor:
    """The 2-norm, [T, K] in fp64, of the terms whose sum is the gradient of a routing weight, dout times the expert's row."""
    made = torch.zeros(tensors.topk_weights.shape, dtype=torch.float64, device=dout.device)
    for expert, tokens, place in assigned(tensors):
        given = tensors.x[tokens], tensors.w1[expert], tensors.w2[expert]
        biases = (None if one is None else one[expert].double() for one in (tensors.gate_up_bias, tensors.down_bias))
        row = _rows(activation, *(one.double() for one in given), *biases)
        made[tokens, place] = (dout[tokens].double() * row).norm(dim=1)
    return made


def pre_activations(tensors: Tensors) -> torch.Tensor:
    """The first products and their biases, computed in fp64 and rounded once, of rows in ``BackwardTensors``' order; NaN for
    pairs without an expert here."""
    x, w1, topk_ids, bias = tensors.x, tensors.w1, tensors.topk_ids, tensors.gate_up_bias
    z, row = torch.full((topk_ids.numel(), w1.shape[1]), torch.nan, dtype=x.dtype, device=x.device), 0
    for expert, tokens, _ in assigned(tensors):
        both = x[tokens].double() @ w1[expert].double().T
        z[row : row + len(tokens)] = both if bias is None else both + bias[expert].double()
        row += len(tokens)
    return z


def _differentiated(tensors: Tensors) -> list[torch.Tensor]:
    x, w1, w2, topk_weights, _, *biases, _, _ = tensors
    return [x, w1, w2, topk_weights, *(one for one in biases if one is not None)]


def _rows(activation: Activation, *given: Any) -> torch.Tensor:
    """The rows of one expert, before their weights."""
    x, w1, w2, of_first, of_second = given
    both = x @ w1.T
    row: torch.Tensor = activate(both if of_first is None else both + of_first, activation) @ w2.T
    return row if of_second is None else row + of_second


def _gradients(tensors: Tensors, activation: Activation, dout: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    of_sum = torch.promote_types(dtype, torch.float32)
    made = tuple(torch.zeros(one.shape, dtype=of_sum, device=one.device) for one in _differentiated(tensors))
    x, w1, w2, topk_weights, _, gate_up_bias, down_bias, *_ = tensors
    for expert, tokens, place in assigned(tensors):
        given = x[tokens], topk_weights[tokens, place], w1[expert], w2[expert]
        biases = (one[expert] for one in (gate_up_bias, down_bias) if one is not None)
        leaves = [one.detach().to(dtype).requires_grad_() for one in (*given, *biases)]
        rows, weight, first, second, *biases_of = leaves
        of_first, of_second = gate_up_bias, down_bias
        if of_first is not None:
            of_first, *biases_of = biases_of
        if of_second is not None:
            (of_second,) = biases_of
        with torch.enable_grad():
            out = _rows(activation, rows, first, second, of_first, of_second) * weight[:, None]
        found = torch.autograd.grad(out, leaves, dout[tokens].to(dtype))
        of_rows, of_weight, *of_each = (one.to(of_sum) for one in found)
        made[0].index_add_(0, tokens, of_rows)
        made[3][tokens, place] = of_weight
        for whole, part in zip((*made[1:3], *made[4:]), of_each, strict=True):
            whole[expert] = part
    return made
