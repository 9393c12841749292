"""Kernels that are right, each adding up in an order of its own: attention as ``fn(q, k, v, causal, softmax_scale)``,
merges as ``fn(outs, lses)``, and experts. Beside them the examples and PyTorch's own are honest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as pytorch_attention
from torch.nn.functional import silu

from flashmoe_science.measure.worker.loading import load
from flashmoe_science.moe import dequantize_experts, fused_moe
from flashmoe_science.ops.attention.call.merge import MergeInputs
from flashmoe_science.ops.attention.peers.merge import at_once, in_turns

EXAMPLES = Path(__file__).parents[2] / "examples"
LOG2E = 1.4426950408889634


def _scores(
    q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float | None, times: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 scores times ``times``, and whether a query may see a key."""
    rows, keys = q.shape[2], k.shape[2]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1).float()
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        seen = seen.tril(keys - rows)
    scores = q.float() @ k.mT * ((q.shape[-1] ** -0.5 if scale is None else scale) * times)
    return scores.masked_fill(~seen, -torch.inf), seen


def _values(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1).float()


def blocks(
    block: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    """Online softmax in base 2, ``block`` keys at a time, weights rounded to the dtype of V, as FlashAttention does it."""
    scores, _ = _scores(q, k, causal, softmax_scale, LOG2E)
    largest = scores.new_full((*q.shape[:3], 1), -torch.inf)
    total, out = torch.zeros_like(largest), 0.0
    for part, values in zip(scores.split(block, -1), _values(q, v).split(block, 2), strict=True):
        before, largest = largest, torch.maximum(largest, part.amax(-1, keepdim=True))
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        weights, rescale = torch.exp2(part - shift), torch.exp2(before - shift)
        total = total * rescale + weights.sum(-1, keepdim=True)
        out = out * rescale + weights.to(v.dtype).float() @ values
    return (out / total.masked_fill(total == 0, 1.0)).to(q.dtype)


def splits(
    count: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    """Split-KV: ``count`` parts of the keys apart, merged by their log-sum-exps, as Flash-Decoding does it: the rounding of a
    large one is in all weights of a row."""
    scores, _ = _scores(q, k, causal, softmax_scale)
    outs, lses = [], []
    for part, values in zip(scores.chunk(count, -1), _values(q, v).chunk(count, 2), strict=True):
        largest = part.amax(-1, keepdim=True)
        weights = torch.exp(part - largest.masked_fill(largest == -torch.inf, 0.0))
        total = weights.sum(-1, keepdim=True)
        outs.append((weights.to(v.dtype).float() @ values) / total.masked_fill(total == 0, 1.0))
        lses.append(largest + total.log())
    every = torch.stack(lses)
    weights = torch.exp(every - torch.logsumexp(every, 0)).nan_to_num(nan=0.0)
    return (weights * torch.stack(outs)).sum(0).to(q.dtype)


def reordered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    """The naive way with head dimension and keys in reverse, and the scale on Q."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores, _ = _scores((q.float() * scale).flip(-1), k.flip(-1), causal, 1.0)
    weights = torch.softmax(scores.flip(-1), -1).nan_to_num(nan=0.0)
    return (weights @ _values(q, v).flip(2)).to(q.dtype)


def pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    _, seen = _scores(q, k, causal, softmax_scale)
    out = pytorch_attention(q, k, v, attn_mask=seen if causal else None, scale=softmax_scale, enable_gqa=True)
    return out.nan_to_num(nan=0.0)


def in_base_2(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts merged as FlashDecoding's kernels do it: powers of 2 below the highest."""
    powers = lses.transpose(-1, -2) * LOG2E
    highest = powers.amax(0)
    weights = torch.exp2(powers - highest.masked_fill(highest == -torch.inf, 0.0)).unsqueeze(-1)
    total = weights.sum(0)
    out = (outs.float().masked_fill(weights == 0.0, 0.0) * weights).sum(0) / total.masked_fill(total == 0.0, 1.0)
    lse = (torch.log2(total.squeeze(-1)) + highest) / LOG2E
    return out.to(outs.dtype), lse.transpose(-1, -2)


def _of_experts(topk_ids: torch.Tensor, topk_weights: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids as indices and weights, of an id that is no expert the first one with a weight of 0."""
    ours = (topk_ids >= 0) & (topk_ids < experts)
    return torch.where(ours, topk_ids, 0).long(), torch.where(ours, topk_weights, 0.0)


def token_by_token(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Each pair of a token and an expert alone, products added up as a warp does it, in fp32 to the end."""
    ids, topk_weights = _of_experts(topk_ids, topk_weights, len(w1))
    gate, up = (w1[ids].float() * x[:, None, None, :].float()).sum(-1).chunk(2, -1)  # [tokens, top_k, hidden]
    down = (w2[ids].float() * (silu(gate) * up)[:, :, None, :]).sum(-1)
    return (down * topk_weights[..., None]).sum(1).to(x.dtype)


def in_halves(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Every expert on every token, both products in two halves of what they sum over, and the activation rounded between."""
    tokens, dim = x.shape
    shares = x.new_zeros(tokens, w1.shape[0], dtype=torch.float32)
    shares.scatter_add_(1, *_of_experts(topk_ids, topk_weights, len(w1)))

    def product(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        half = rows.shape[-1] // 2
        return rows[..., half:] @ weights[..., half:].mT + rows[..., :half] @ weights[..., :half].mT

    gate, up = product(x.float().expand(w1.shape[0], tokens, dim), w1.float()).chunk(2, -1)
    down = product((silu(gate) * up).to(x.dtype).float(), w2.float())  # [experts, tokens, dim]
    return (down * shares.T[:, :, None]).sum(0).to(x.dtype)


def dequantised_first(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **in_format: Any
) -> torch.Tensor:
    """Weights in the dtype of x, as at load, and then in halves."""
    return in_halves(x, *dequantize_experts(w1, w2, **in_format, dtype=x.dtype), topk_weights, topk_ids)


def dequantised_inside(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **in_format: Any
) -> torch.Tensor:
    """Each weight in fp32, never rounded, token by token."""
    return token_by_token(x, *dequantize_experts(w1, w2, **in_format, dtype=torch.float32), topk_weights, topk_ids)


def of_examples(file: str, name: str) -> Callable[..., Any]:
    return load(f"{EXAMPLES}/{file}.py:{name}")


def by_broadcasting(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    """K and V of one head are broadcast, as the plainest code has it: PyTorch then adds up one product after another."""
    if k.shape[1] > 1:
        raise ValueError("of one key head")
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2] if causal else k.shape[2])
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num(nan=0.0)
    return (weights @ v.float()).to(q.dtype)


def in_order(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Experts in fp32 whose sums add one product after another."""

    def product(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(len(rows), len(weights))
        for column, factors in zip(rows.T.float(), weights.T.float(), strict=True):
            made += column[:, None] * factors
        return made

    out = torch.zeros(x.shape)
    for expert in range(len(w1)):
        tokens, place = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate, up = product(x[tokens], w1[expert]).chunk(2, -1)
        out.index_add_(0, tokens, product(silu(gate) * up, w2[expert]) * topk_weights[tokens, place, None])
    return out.to(x.dtype)


ATTENTION: dict[str, Callable[..., Any]] = {
    "cpu_attention": of_examples("cpu_attention", "attention"),
    "blocks of 16": partial(blocks, 16),
    "blocks of 64": partial(blocks, 64),
    "3 splits": partial(splits, 3),
    "8 splits": partial(splits, 8),
    "reordered": reordered,
    "pytorch": pytorch,
}
MERGES: dict[str, Callable[..., Any]] = {
    "at once": at_once,
    "in turns": lambda outs, lses: in_turns(MergeInputs(outs, lses)),
    "in base 2": in_base_2,
}
EXPERTS: dict[str, Callable[..., Any]] = {
    "moe_grouped": of_examples("moe_grouped", "experts"),
    "token by token": token_by_token,
    "in halves": in_halves,
    "fused_moe": fused_moe,
}
EXPERTS_IN_FORMATS: dict[str, Callable[..., Any]] = {
    "dequantised first": dequantised_first,
    "dequantised inside": dequantised_inside,
    "fused_moe": fused_moe,
}
