"""Faults of merges of attention to parts of the keys."""

import torch

from flashmoe_science.contract import contract


def _weights(lses, lse):
    """[parts, tokens, heads, 1]"""
    return (lses - lse).exp().nan_to_num(0.0).transpose(1, 2).unsqueeze(-1)


def _sum(weights, outs):
    """Without what a weight of 0 is of."""
    return torch.where(weights == 0, 0.0, weights * outs).sum(0).to(outs.dtype)


@contract("attention_merge")
def merge_by_the_largest(outs, lses):
    """Takes weights from the largest log-sum-exp, and does not divide by their sum."""
    return _sum(_weights(lses, lses.amax(0)), outs), lses.logsumexp(0)


@contract("attention_merge")
def merge_keeps_the_largest(outs, lses):
    """Merges right, and gives the largest log-sum-exp as that of all."""
    return _sum(_weights(lses, lses.logsumexp(0)), outs), lses.amax(0)


@contract("attention_merge")
def merge_reads_what_has_no_key(outs, lses):
    """Multiplies what a part without a key left by 0."""
    lse = lses.logsumexp(0)
    return (_weights(lses, lse) * outs).sum(0).to(outs.dtype), lse


@contract("attention_merge")
def merge_of_eight_parts(outs, lses):
    """Has room for eight parts."""
    lse = lses[:8].logsumexp(0)
    return _sum(_weights(lses[:8], lse), outs[:8]), lse


@contract("attention_merge")
def merge_without_a_maximum(outs, lses):
    """Sums exponentials of the log-sum-exps themselves."""
    weights = lses.exp().transpose(1, 2).unsqueeze(-1)
    total = torch.where(weights == 0, 0.0, weights * outs).sum(0) / weights.sum(0).clamp_min(1e-38)
    return total.to(outs.dtype), lses.exp().sum(0).log()


@contract("attention_merge")
def merge_nothing_is_nan(outs, lses):
    """Divides 0 by 0 where no part has a key."""
    lse = lses.logsumexp(0)
    return _sum((lses - lse).exp().transpose(1, 2).unsqueeze(-1), outs), lse


@contract("attention_merge")
def merge_in_16_bits(outs, lses):
    """Rounds each part's weight and the sum after each part."""
    lse, total = lses.logsumexp(0), 0
    for out, weight in zip(outs, _weights(lses, lse).bfloat16(), strict=True):
        total = (total + torch.where(weight == 0, 0.0, weight * out)).bfloat16()
    return total.to(outs.dtype), lse
