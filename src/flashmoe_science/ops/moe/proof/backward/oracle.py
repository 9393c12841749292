"""Gradients of experts computed to be right, not fast: autograd of one expert at a time, in fp64 or the input dtype."""

from __future__ import annotations

import torch

from flashmoe_science.ops.moe.call import Activation, Tensors
from flashmoe_science.ops.moe.proof.oracle import assigned
from flashmoe_science.ops.moe.pytorch import activate, add_bias


def gradients_oracle(tensors: Tensors, activation: Activation, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of x, w1, w2, the routing weights and the biases that there are, in fp64."""
    return _gradients(tensors, activation, dout, torch.float64)


def gradients_plain(tensors: Tensors, activation: Activation, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same in the dtype of x, each step rounded to it; an expert's part of dx is added in fp32. TF32 is off."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        made = _gradients(tensors, activation, dout, tensors.x.dtype)
    finally:
        torch.set_float32_matmul_precision(precision)
    return tuple(one.to(like.dtype) for one, like in zip(made, _differentiated(tensors), strict=True))


def routing_gradient(logits: torch.Tensor, topk_ids: torch.Tensor, dweights: torch.Tensor) -> torch.Tensor:
    """The gradient of router logits through the softmax over all experts, renormalised over the chosen."""
    logits = logits.detach().requires_grad_()
    with torch.enable_grad():
        chosen = torch.softmax(logits, -1).gather(-1, topk_ids.long())
        weights = chosen / chosen.sum(-1, keepdim=True)
    (made,) = torch.autograd.grad(weights, logits, dweights.to(logits.dtype))
    return made


def routing_terms(tensors: Tensors, activation: Activation, dout: torch.Tensor) -> torch.Tensor:
    """The 2-norm of the terms dout * row that the gradient of each routing weight sums, in fp64 [tokens, top_k]."""
    norms = torch.zeros(tensors.topk_ids.shape, dtype=torch.float64, device=dout.device)
    for expert, tokens, place in assigned(tensors):
        both = tensors.x[tokens].double() @ tensors.w1[expert].double().T
        both = add_bias(both, tensors.gate_up_bias, expert)
        row = add_bias(activate(both, activation) @ tensors.w2[expert].double().T, tensors.down_bias, expert)
        norms[tokens, place] = torch.linalg.vector_norm(dout[tokens].double() * row, dim=-1)
    return norms


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


def _gradients(tensors: Tensors, activation: Activation, dout: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    of_sum = torch.promote_types(dtype, torch.float32)
    made = tuple(torch.zeros(one.shape, dtype=of_sum, device=one.device) for one in _differentiated(tensors))
    x, w1, w2, topk_weights, _, gate_up_bias, down_bias, *_ = tensors
    for expert, tokens, place in assigned(tensors):
        given = x[tokens], topk_weights[tokens, place], w1[expert], w2[expert]
        biases = (one[expert] for one in (gate_up_bias, down_bias) if one is not None)
        leaves = [one.detach().to(dtype).requires_grad_() for one in (*given, *biases)]
        rows, weight, first, second, *biases_of = leaves
        with torch.enable_grad():
            both = rows @ first.T
            row = activate(both if gate_up_bias is None else both + biases_of[0], activation) @ second.T
            out = (row if down_bias is None else row + biases_of[-1]) * weight[:, None]
        found = torch.autograd.grad(out, leaves, dout[tokens].to(dtype))
        of_rows, of_weight, *of_each = (one.to(of_sum) for one in found)
        made[0].index_add_(0, tokens, of_rows)
        made[3][tokens, place] = of_weight
        for whole, part in zip((*made[1:3], *made[4:]), of_each, strict=True):
            whole[expert] = part
    return made
