"""Attention computed to be right, not fast: an fp64 oracle, and the same maths done plainly in the input dtype.

Both work in chunks of key/value heads and of queries, so that neither a score matrix of S x S for all heads nor a repeated
copy of K and V for grouped queries is ever held. Problems with modes are computed in modes_oracle.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashmoe_science.ops.attention.call.kernel import AttentionInputs
from flashmoe_science.ops.attention.problem.features import PLAIN
from flashmoe_science.ops.attention.proof import modes_oracle

CHUNK_SCORES = 2**25  # scores held at once: 256 MiB in fp64
_PLAIN_CHUNK_SCORES = 2**27  # the plain version's scores are 2 or 4 bytes each


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Query rows ``first`` to ``last`` of ``heads`` (a slice of batch x heads_kv), which see keys before ``keys``."""

    heads: slice
    first: int
    last: int
    keys: int


def _chunks(inputs: AttentionInputs, limit: int) -> Iterator[_Chunk]:
    problem = inputs.problem
    group = problem.heads // problem.heads_kv
    all_heads = problem.batch * problem.heads_kv
    heads = max(1, limit // (group * problem.seqlen_q * problem.seqlen_k))
    rows = problem.seqlen_q if heads > 1 else max(1, limit // (group * problem.seqlen_k))
    for head in range(0, all_heads, heads):
        for first in range(0, problem.seqlen_q, rows):
            last = min(first + rows, problem.seqlen_q)
            keys = min(problem.seqlen_k, max(1, last + problem.causal_offset)) if problem.causal else problem.seqlen_k
            yield _Chunk(slice(head, min(head + heads, all_heads)), first, last, keys)


def _grouped(tensor: torch.Tensor, heads_kv: int) -> torch.Tensor:
    """[B, H, S, D] to [B * heads_kv, group, S, D]; a view where the strides allow it, else one copy of one tensor."""
    batch, heads, seqlen, dim = tensor.shape
    return tensor.reshape(batch * heads_kv, heads // heads_kv, seqlen, dim)


def _hidden(inputs: AttentionInputs, chunk: _Chunk) -> torch.Tensor | None:
    """The mask of a chunk, True where a query may not see a key: [rows, keys], or None where all is seen."""
    problem = inputs.problem
    if not problem.causal:
        return None
    rows = torch.arange(chunk.first, chunk.last, device=inputs.q.device)
    keys = torch.arange(chunk.keys, device=inputs.q.device)
    return keys[None, :] > rows[:, None] + problem.causal_offset


def attention_oracle(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention in fp64.

    Returns:
        out [B, H, Sq, Dv] and lse [B, H, Sq] (natural log), both fp64. A row that sees no key is zeros, its lse -inf.
    """
    if inputs.problem.modes != PLAIN:
        return modes_oracle.exact(inputs)
    problem = inputs.problem
    q, k, v = (_grouped(tensor, problem.heads_kv) for tensor in (inputs.q, inputs.k, inputs.v))
    shape = (problem.batch * problem.heads_kv, problem.heads // problem.heads_kv, problem.seqlen_q)
    out = torch.empty((*shape, problem.head_dim_v), dtype=torch.float64, device=q.device)
    lse = torch.empty(shape, dtype=torch.float64, device=q.device)
    for chunk in _chunks(inputs, CHUNK_SCORES):
        rows = slice(chunk.first, chunk.last)
        keys = k[chunk.heads, :, : chunk.keys].double()
        scores = q[chunk.heads, :, rows].double() @ keys.transpose(-1, -2)
        scores *= inputs.softmax_scale
        hidden = _hidden(inputs, chunk)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        norm = torch.logsumexp(scores, -1, keepdim=True)
        # A row of nothing but -inf has a norm of -inf; against 0 its weights are exp(-inf) = 0, as they should be.
        scores.sub_(torch.where(norm == -torch.inf, 0.0, norm)).exp_()
        out[chunk.heads, :, rows] = scores @ v[chunk.heads, :, : chunk.keys].double()
        lse[chunk.heads, :, rows] = norm[..., 0]
    return (
        out.view(problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v),
        lse.view(problem.batch, problem.heads, problem.seqlen_q),
    )


def attention_plain(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The same maths in the input dtype, each step rounded to it: what an honest kernel must not be much worse than.

    K is scaled in place of Q, so that the order of operations differs from a kernel's (as FlashAttention's tests do). The
    log-sum-exp is done in fp32 throughout, which is what a kernel that returns it in fp32 has to match.

    Returns:
        out [B, H, Sq, Dv] in the input dtype, lse [B, H, Sq] in fp32. TF32 is off, whatever the caller has set.
    """
    if inputs.problem.modes != PLAIN:
        return modes_oracle.plain(inputs)
    problem = inputs.problem
    q, k, v = (_grouped(tensor, problem.heads_kv) for tensor in (inputs.q, inputs.k, inputs.v))
    shape = (problem.batch * problem.heads_kv, problem.heads // problem.heads_kv, problem.seqlen_q)
    out = torch.empty((*shape, problem.head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for chunk in _chunks(inputs, _PLAIN_CHUNK_SCORES):
            rows = slice(chunk.first, chunk.last)
            queries, keys = q[chunk.heads, :, rows], k[chunk.heads, :, : chunk.keys]
            hidden = _hidden(inputs, chunk)
            scores = _masked(queries @ (keys * inputs.softmax_scale).transpose(-1, -2), hidden)
            weights = torch.softmax(scores, -1).nan_to_num_(nan=0.0)  # nan: the softmax of a row that sees nothing
            out[chunk.heads, :, rows] = weights @ v[chunk.heads, :, : chunk.keys]
            scores32 = _masked(queries.float() @ (keys.float() * inputs.softmax_scale).transpose(-1, -2), hidden)
            lse[chunk.heads, :, rows] = torch.logsumexp(scores32, -1)
    finally:
        torch.set_float32_matmul_precision(precision)
    return (
        out.view(problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v),
        lse.view(problem.batch, problem.heads, problem.seqlen_q),
    )


def _masked(scores: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)
