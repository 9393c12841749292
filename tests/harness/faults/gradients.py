"""Faults of a backward: the output is right, its gradients are not."""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashmoe_science.contract import contract

_CALLS = [0]


@contract("attention_backward")
def gradient_without_the_last_tile(q, k, v, causal=False, softmax_scale=None):
    """Leaves the rows of dQ past the last whole tile of 64 at zero."""
    whole = q.shape[2] // 64 * 64
    q = torch.cat((q[:, :, :whole], q[:, :, whole:].detach()), 2)
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)


@contract("attention_backward")
def gradient_of_other_heads(q, k, v, causal=False, softmax_scale=None):
    """Adds what query head h gives to dK and dV of head h % heads_kv where it read head h // (heads / heads_kv)."""
    group = q.shape[1] // k.shape[1]
    k, v = (one.detach().repeat_interleave(group, 1) + (one - one.detach()).repeat(1, group, 1, 1) for one in (k, v))
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)


@contract("attention_backward")
def gradient_in_another_order(q, k, v, causal=False, softmax_scale=None):
    """Promises the same bits, and rounds dQ otherwise in each call, as atomic adds do."""
    _CALLS[0] += 1
    q = q * 1.0
    q.register_hook(lambda gradient: gradient * (1.0 + 2.0**-20 * (_CALLS[0] % 2)))
    return sdpa(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)


gradient_in_another_order.promises = {"deterministic": True}


@contract("attention_backward")
def gradient_without_the_log_sum_exp(q, k, v, causal=False, softmax_scale=None):
    """Returns a log-sum-exp whose gradient it drops, as FlashAttention-3 does."""
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2] if causal else k.shape[2])
    scores = q.detach() @ k.detach().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    lse = scores.float().masked_fill(~seen, -torch.inf).logsumexp(-1)
    return sdpa(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True), lse + 0.0 * q.float().sum(-1)
