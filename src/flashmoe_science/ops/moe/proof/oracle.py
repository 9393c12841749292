"""References for a mixture of experts: an fp64 oracle, the same maths done plainly in the input dtype, and the
router's softmax and top-k. One expert's weights are widened at a time, never all of them: those of DeepSeek-V3 take 90 GB in
fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from flashmoe_science.ops.formats import dequantized
from flashmoe_science.ops.moe.call import SWIGLU, Activation, Tensors
from flashmoe_science.ops.moe.pytorch import activate, add_bias, as_multiplied
from flashmoe_science.ops.plain import plain_product, without_tf32


def moe_oracle(tensors: Tensors, activation: Activation = SWIGLU) -> torch.Tensor:
    """The experts of ``problem.MoEProblem`` in fp64, out [tokens, dim]. Ids that are of no expert add nothing."""
    return _experts(tensors, activation, torch.float64)


def moe_scheme(tensors: Tensors, activation: Activation = SWIGLU) -> torch.Tensor:
    """The oracle of ``w8a8``. By how much it differs from the one without is what the scheme costs, whoever computes it."""
    return _experts(tensors, replace(activation, w8a8=True), torch.float64)


def moe_single_level(tensors: Tensors, activation: Activation = SWIGLU) -> torch.Tensor:
    """The oracle of products that tensor cores of 8 bits add up over the whole depth: in 14 bits."""
    return _experts(tensors, activation, torch.float64, _in_14_bits)


def _in_14_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b, of which 32 products at a time are added, and what they add up to is cut to 14 bits."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for first in range(0, a.shape[1], 32):
        mantissa, exponent = torch.frexp(total + a[:, first : first + 32] @ b[first : first + 32])
        total = torch.ldexp((mantissa * 2**14).trunc(), exponent - 14)
    return total


@without_tf32()
def moe_plain(tensors: Tensors, activation: Activation = SWIGLU) -> torch.Tensor:
    """The same in the dtype of x, each step rounded to it: the error that a kernel's is compared with."""
    return _experts(tensors, activation, tensors.x.dtype, plain_product(tensors.x.dtype, tensors.x.device))


def _experts(
    tensors: Tensors,
    activation: Activation,
    dtype: torch.dtype,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> torch.Tensor:
    x, w1, w2, topk_weights, _, gate_up_bias, down_bias, *_, of_x, of_active = tensors
    in_format = tensors.in_format() or (None, None)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for expert, tokens, place in assigned(tensors):
        first, second = (
            one[expert].to(dtype) if coded is None else dequantized(coded.of(expert), dtype, halves)
            for one, coded, halves in zip((w1, w2), in_format, (activation.halves, False), strict=True)
        )
        rows = as_multiplied(x[tokens].to(dtype), activation, None if of_x is None else of_x[expert])
        both = add_bias(product(rows, first.T), gate_up_bias, expert)  # [rows, 2 * hidden]
        active = as_multiplied(activate(both, activation), activation, None if of_active is None else of_active[expert])
        row = add_bias(product(active, second.T), down_bias, expert)  # [rows, dim]
        out.index_add_(0, tokens, row * topk_weights[tokens, place, None].to(dtype))
    return out


def routing_oracle(
    logits: torch.Tensor, top_k: int, renormalise: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over experts in ``dtype``, and the ``top_k`` largest logits of a token, the largest first, of equals the lowest.

    Experts are compared by their logits as they are given: in fp32 two that differ in the last bit are different, though their
    probabilities may round to one number.

    Args:
        logits: [tokens, experts].
        renormalise: divide the weights of a token by their sum.

    Returns:
        topk_weights [tokens, top_k] in ``dtype`` and topk_ids [tokens, top_k] in int32.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(f"top_k is {top_k}; it must be from 1 to {logits.shape[-1]}, the number of experts")
    # The order of equals in torch.topk is not specified.
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = torch.softmax(logits.to(dtype), -1).gather(-1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.int()


def assigned(tensors: Tensors) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each expert with a token here, its tokens and the places of their choices, in the order of pairs."""
    for expert in (one for one in torch.unique(tensors.topk_ids).tolist() if 0 <= one < len(tensors.w1)):
        yield (expert, *torch.nonzero(tensors.topk_ids == expert, as_tuple=True))
