"""Parts of the inputs that the contract of experts draws: weights in formats, logits, the routing."""

from __future__ import annotations

import torch

from flashmoe_science.contract import unit_roundoff
from flashmoe_science.formats import FORMATS
from flashmoe_science.ops.formats import quantized
from flashmoe_science.ops.moe.call import activation_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.proof.variants import SCALES, ZERO_POINTS, Made


def in_format(problem: MoEProblem, w1: torch.Tensor, w2: torch.Tensor, generator: torch.Generator) -> Made:
    """The weights in the problem's format, an expert at a time, and their scales, each half, once or twice its own: neighbours
    differ."""
    form, halves, made = FORMATS[str(problem.weight_format)], activation_of(problem).halves, Made()
    for n, (name, weights, split) in enumerate((("w1", w1, halves), ("w2", w2, False))):
        split &= form.in_blocks
        experts = weights[:1] if weights.is_meta else weights  # without memory all are alike, and each takes milliseconds
        parts = [quantized(one, form, split) for one in experts] * (len(weights) // len(experts))
        codes, scale = torch.stack([one.codes for one in parts]), torch.stack([one.scale for one in parts])
        by = torch.randint(-1, 2, scale.shape, device=scale.device, generator=generator)
        scale = (
            (scale.int() + by).clamp(0, 254).to(torch.uint8)
            if scale.dtype == torch.uint8
            else (scale * 2.0**by).to(scale.dtype)
        )
        made |= {name: codes, SCALES[n]: scale}
        zero_points = [one.zero_point for one in parts if one.zero_point is not None]
        made |= {ZERO_POINTS[n]: torch.stack(zero_points)} if zero_points else {}
    return made


def input_scale(problem: MoEProblem, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Of each expert that of numbers to 16, or to as little as 8, of what is near 1."""
    return torch.exp2(-torch.rand(problem.experts, device=device, generator=generator)) * (16 / 448)


def router_logits(problem: MoEProblem, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """fp32 [tokens, experts], see MoEContract. Experts arrive at random, each at a rate of its own, the first has the largest
    logit: the first ``top_k`` are a draw without replacement, in proportion to the rates."""

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (problem.tokens, 1), device=device, generator=generator) / 64

    arrivals = torch.rand(problem.tokens, problem.experts, device=device, generator=generator).log_().neg_()
    if problem.routing == "zipf":
        arrivals *= 1 + torch.randperm(problem.experts, device=device, generator=generator)
    place = arrivals.argsort(-1).argsort(-1)
    return integers(-64, 65) - place * integers(8, 33)


def touching_every_expert(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """The routing with its first tokens assigned in turn to all experts: ``MoEProblem.min_bytes`` counts as many."""
    tokens, top_k = ids.shape
    assigned = min(tokens, -(-experts // top_k))
    turns = torch.arange(assigned * top_k, device=ids.device, dtype=ids.dtype) % experts
    return torch.cat([turns.view(assigned, top_k), ids[assigned:]])


def alike(made: Made) -> Made:
    """Experts that are copies of the first; of a token's weights the first is 1, and each other so small that a sum in 16 bits
    loses it beside that: what 64 lose is beyond the cap, what 16 lose, as the plain maths does, within it."""
    if "topk_ids" in made:
        for name in made.keys() - {"x", "dout", "topk_weights", "topk_ids"}:
            made[name][1:] = made[name][:1].clone()
        made["topk_ids"].copy_(made["topk_ids"].sort(-1).values)  # the first in the order of experts too
        made["topk_weights"].fill_(0.75 * max(unit_roundoff(made["x"].dtype), 2.0**-11))[:, 0] = 1.0
    return made
