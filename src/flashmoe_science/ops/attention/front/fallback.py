"""PyTorch's own attention with the masks, the zero rows and the log-sum-exp of this package.

It serves what our kernels do not: tensors on the CPU, and inputs that need gradients.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F

from flashmoe_science.ops.attention.problem import Mask

_SCORES_AT_ONCE = 2**24  # 64 MiB of fp32 scores, the most that the log-sum-exp holds at a time


def pytorch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, softmax_scale: float | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(Q K^T * scale + mask) V by ``torch.nn.functional.scaled_dot_product_attention``; differentiable in Q, K, V.

    Args:
        q: [batch, heads, seqlen_q, head_dim]; k and v have heads_kv heads, a divisor of heads, and seqlen_k keys.
        mask: of AttentionProblem. A query that sees no key gets zeros, and -inf in the log-sum-exp.
        softmax_scale: None for head_dim ** -0.5.
        return_lse: also return the log-sum-exp, which costs a second Q K^T and has no gradient.

    Returns:
        out [batch, heads, seqlen_q, head_dim_v] in the input dtype; lse [batch, heads, seqlen_q] fp32, natural log, or None.
    """
    with _without_autocast(q):
        if 0 in (*q.shape, *k.shape):
            return _nothing(q, k, v, return_lse)
        out = _output(q, k, v, mask, softmax_scale)
        lse = _log_sum_exp(q, k, mask, softmax_scale) if return_lse else None
    return out, lse


def _nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result where there is no query or no key: zeros, part of the graph as any output is, and -inf."""
    group = q.shape[1] // max(1, k.shape[1])
    k, v = (tensor.repeat_interleave(group, 1)[:, :, :0] for tensor in (k, v))
    out = (q @ k.mT) @ v  # a sum over no keys
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32) if return_lse else None
    return out, lse


def _without_autocast(q: torch.Tensor) -> AbstractContextManager[None]:
    # Autocast would give an output of another dtype than the inputs'.
    if torch.is_autocast_enabled(q.device.type):
        return torch.autocast(q.device.type, enabled=False)
    return contextlib.nullcontext()


def _output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float | None) -> torch.Tensor:
    queries, keys = q.shape[2], k.shape[2]
    if scale is not None and scale <= 0.0:
        # PyTorch's CPU kernel masks before it scales, so that -inf turns to +inf or NaN: give the sign to Q, which is exact.
        q, scale = (-q, -scale) if scale < 0.0 else (q * 0.0, 1.0)
    gqa = bool(q.shape[1] != k.shape[1])  # symbolic under torch.compile
    if mask == "full":
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=gqa)
    if mask == "causal-topleft" or queries == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    if queries > keys:
        # The first queries see no key. The others are a square causal problem, which needs no mask tensor.
        blind = queries - keys
        seeing = F.scaled_dot_product_attention(q[:, :, blind:], k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        return F.pad(seeing, (0, 0, blind, 0))
    visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=gqa)


@torch.no_grad()
def _log_sum_exp(q: torch.Tensor, k: torch.Tensor, mask: Mask, scale: float | None) -> torch.Tensor:
    batch, heads, queries, width = q.shape
    heads_kv, keys = k.shape[1], k.shape[2]
    grouped = q.reshape(batch, heads_kv, heads // heads_kv, queries, width)
    keys_t = k.float().mT.unsqueeze(2)  # [batch, heads_kv, 1, head_dim, seqlen_k]
    factor = width**-0.5 if scale is None else scale
    offset = keys - queries if mask == "causal" else 0
    step = max(1, _SCORES_AT_ONCE // (batch * heads * keys))
    pieces = []
    for first in range(0, queries, step):
        rows = grouped[:, :, :, first : first + step].float()
        scores = (rows * factor) @ keys_t
        if mask != "full":
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(first + offset)
            scores = scores.masked_fill_(~visible, float("-inf"))
        pieces.append(scores.logsumexp(-1))
    return torch.cat(pieces, dim=-1).flatten(1, 2)
