"""Attention with features as its definition says it, one query and one key at a time, in Python's own floats."""

from __future__ import annotations

import math

import torch

from flashmoe_science.ops.attention.call.kernel import AttentionInputs


def naive(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in fp64, in the shape of Q."""
    problem, given = inputs.problem, inputs.tensors
    out = torch.zeros((*inputs.q.shape[:3], problem.head_dim_v), dtype=torch.float64)
    lse = torch.full(inputs.q.shape[:3], -math.inf, dtype=torch.float64)
    batch = problem.batch if given.cu_seqlens_q is None else len(given.cu_seqlens_q) - 1
    for b in range(batch):
        place, start, queries = b, 0, problem.seqlen_q
        if given.cu_seqlens_q is not None:
            place, start = 0, int(given.cu_seqlens_q[b])
            queries = int(given.cu_seqlens_q[b + 1]) - start
        for head in range(problem.heads):
            for i in range(queries):
                q = inputs.q[place, head, start + i].double()
                out[place, head, start + i], lse[place, head, start + i] = _row(inputs, b, head, i, queries, q)
    return out, lse


def _row(inputs: AttentionInputs, b: int, head: int, i: int, queries: int, q: torch.Tensor) -> tuple[torch.Tensor, float]:
    problem, given, features = inputs.problem, inputs.tensors, inputs.problem.features
    kv = head * problem.heads_kv // problem.heads
    keys = _length(inputs, b)
    scores, values = [], []
    for j in range(keys):
        if not _sees(inputs, b, i, j, queries, keys):
            continue
        if features.bias == "boolean" and not bool(given.bias[b, head, i, j]):
            continue
        k, v = (_at(inputs, tensor, b, kv, j).double() for tensor in (inputs.k, inputs.v))
        if features.fp8_cache:
            k, v = k * given.k_scale[b, kv].double(), v * given.v_scale[b, kv].double()
        score = float(q @ k) * inputs.softmax_scale
        if features.softcap:
            score = inputs.options.softcap * math.tanh(score / inputs.options.softcap)
        if features.bias == "alibi":
            score -= float(given.alibi_slopes[b, head]) * abs(i + keys - queries - j)
        if features.bias == "additive":
            score += float(given.bias[b, head, i, j])
        scores.append(score)
        values.append(v)
    every = [*scores, float(given.sinks[head])] if features.sinks else scores
    if not every:
        return torch.zeros(problem.head_dim_v, dtype=torch.float64), -math.inf
    total = max(every) + math.log(sum(math.exp(one - max(every)) for one in every))
    row = torch.zeros(problem.head_dim_v, dtype=torch.float64)
    for score, v in zip(scores, values, strict=True):
        row += math.exp(score - total) * v
    return row, total


def _length(inputs: AttentionInputs, b: int) -> int:
    given = inputs.tensors
    if given.cache_seqlens is not None:
        return int(given.cache_seqlens[b])
    if given.cu_seqlens_k is not None:
        return int(given.cu_seqlens_k[b + 1] - given.cu_seqlens_k[b])
    return inputs.problem.seqlen_k


def _at(inputs: AttentionInputs, tensor: torch.Tensor, b: int, kv: int, j: int) -> torch.Tensor:
    given, page = inputs.tensors, inputs.problem.features.page
    if page:
        return tensor[int(given.page_table[b, j // page]), kv, j % page]
    if given.cu_seqlens_k is not None:
        return tensor[0, kv, int(given.cu_seqlens_k[b]) + j]
    row = b if given.cache_batch_idx is None else int(given.cache_batch_idx[b])
    return tensor[row, kv, j]


def _sees(inputs: AttentionInputs, b: int, i: int, j: int, queries: int, keys: int) -> bool:
    problem, given, features = inputs.problem, inputs.tensors, inputs.problem.features
    here = i if problem.mask == "causal-topleft" else i + keys - queries
    if features.leftpad and j < int(given.leftpad[b]):
        return False
    if features.prefix and j < int(given.prefix[b]):
        return True
    if features.window_left is not None and j < here - features.window_left:
        return False
    if features.window_right is not None and j > here + features.window_right:
        return False
    return not problem.causal or j <= here
