"""Attention to all keys from attention to parts of them, by its formula."""

from __future__ import annotations

import torch


def merge_oracle(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [tokens, heads, head_dim], lse [heads, tokens]) in fp64: each row by the softmax of its parts' log-sum-exps. A part
    with -inf is not read; zeros and -inf where all have it."""
    lses = lses.double()
    keyless = lses == -torch.inf
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(keyless, 0.0, (lses - lse).exp()).transpose(1, 2).unsqueeze(-1)  # [parts, tokens, heads, 1]
    return torch.where(weights == 0.0, 0.0, weights * outs.double()).sum(0), lse
