"""Gives the same numbers whatever it is asked."""

import torch


def attention(q, k, v, causal=False, softmax_scale=None):
    return torch.full_like(q, 0.01)
