"""Faults of merges of attention to parts of the keys."""

import torch

from flashmoe_science.contract import contract


def _weights(lses, lse):
    """[parts, tokens, heads, 1]"""
    return (lses - lse).exp().nan_to_num(0.0).transpose(1, 2).unsqueeze(-1)


def _sum(weights, outs):
    """Without what a weight of 0 is of."""
    return torch.where(weights == 0, 0.0, weights * outs).sum(0).to(outs.dtype)


def _right(outs, lses):
    lse = lses.logsumexp(0)
    return _sum(_weights(lses, lse), outs), lse


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
def merge_with_a_maximum_of_0(outs, lses):
    """Begins the largest log-sum-exp at 0."""
    largest = lses.amax(0).clamp_min(0.0)
    total = (lses - largest).exp().sum(0)
    weights = _weights(lses, largest) / total.clamp_min(1e-38).T.unsqueeze(-1)
    return _sum(weights, outs), largest + total.log()


@contract("attention_merge")
def merge_of_64_heads(outs, lses):
    """Has room for 64 heads."""
    out, lse = _right(outs, lses)
    out[:, 64:] = 0.0
    return out, lse


@contract("attention_merge")
def merge_of_256_columns(outs, lses):
    """Has a tile of 256 columns."""
    out, lse = _right(outs, lses)
    out[..., 256:] = 0.0
    return out, lse


@contract("attention_merge")
def merge_at_most_65535_tokens(outs, lses):
    """Has a program of a grid's second dimension for each token."""
    out, lse = _right(outs, lses)
    out[65535:] = 0.0
    return out, lse


@contract("attention_merge")
def merge_reads_parts_in_a_row(outs, lses):
    """Takes parts' outputs to fill their memory."""
    return _right(outs.as_strided(outs.shape, torch.empty(outs.shape, device="meta").stride()), lses)


@contract("attention_merge")
def merge_reads_log_sum_exps_in_a_row(outs, lses):
    """Takes log-sum-exps to have heads before tokens in memory."""
    return _right(outs, lses.as_strided(lses.shape, torch.empty(lses.shape, device="meta").stride()))


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
