"""Attention with every mode of features.py by PyTorch's operators: differentiable, on any device, and without waiting for one.

It serves what our kernels do not: tensors on the CPU, inputs that need gradients, GPUs that are not NVIDIA's. Ragged, packed
and paged tensors are gathered into [batch, heads, longest, head_dim] with zeros past each length, scores are fp32, and one
masked softmax serves all sequences. Entries of a page table past a length are replaced before they are used as an address.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from flashmoe_science.ops.attention.call.packed import owners
from flashmoe_science.ops.attention.problem import Mask
from flashmoe_science.ops.attention.problem.features import Extras, Modes

_SCORES_AT_ONCE = 2**26  # 256 MiB of fp32 scores, the most that are held at a time where no gradient keeps them


class Dense(NamedTuple):
    """Sequences one beside another. ``rows`` is [batch, heads, longest, head_dim] with zeros past each length; ``lengths`` is
    int64 [batch, 1, 1], or None where all have the longest."""

    rows: torch.Tensor
    lengths: torch.Tensor | None


def modes_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    modes: Modes,
    extras: Extras,
    softmax_scale: float | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(cap(Q K^T * scale) + bias, masked, beside the sinks) V, differentiable in Q, K, V, the sinks, slopes and biases.

    Args:
        q, k, v: views as features.py has them.
        mask: of AttentionProblem; the causal ones are aligned in each sequence by itself.
        softmax_scale: None for head_dim ** -0.5.
        return_lse: also return the log-sum-exp (sinks included), which has no gradient.

    Returns:
        out in the shape of ``q`` with the width of ``v`` and the dtype of ``q``; a row that sees no key gets zeros. lse as
        ``out`` without its last dimension, fp32, natural log, -inf for a row that sees neither a key nor a sink; or None.
    """
    with _without_autocast(q):
        queries = _queries(q, modes, extras)
        keys, values = _cached(k, v, modes, extras)
        scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        out, lse = _in_pieces(queries, keys, values, mask, modes, extras, scale)
        out = _packed_again(out, q, modes, extras).to(q.dtype)
        return out, _packed_again(lse.unsqueeze(-1), q, modes, extras).squeeze(-1) if return_lse else None


def _without_autocast(q: torch.Tensor) -> AbstractContextManager[None]:
    # Autocast would give an output of another dtype than the inputs'.
    if torch.is_autocast_enabled(q.device.type):
        return torch.autocast(q.device.type, enabled=False)
    return contextlib.nullcontext()


# Ragged, packed and paged tensors as dense ones ----------------------------------------------------------------------------


def _queries(q: torch.Tensor, modes: Modes, extras: Extras) -> Dense:
    if modes.lengths != "packed":
        return Dense(q, None)
    assert extras.cu_seqlens_q is not None
    return _unpacked(q, extras.cu_seqlens_q, None, min(extras.max_seqlen_q, q.shape[2]))


def _unpacked(packed: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor | None, longest: int) -> Dense:
    """[1, heads, total, head_dim] with int32 ``starts`` [batch + 1] as a Dense; ``lengths`` [batch] where they are not all."""
    starts = starts.long()
    held = starts[1:] - starts[:-1]
    lengths = held if lengths is None else torch.minimum(lengths.long(), held)
    column = torch.arange(longest, device=packed.device)
    used = column < lengths[:, None]  # [batch, longest]
    if packed.shape[2] == 0:
        return Dense(packed.new_zeros(used.shape[0], packed.shape[1], longest, packed.shape[3]), lengths[:, None, None])
    index = torch.where(used, starts[:-1, None] + column, 0)
    rows = packed[0, :, index].transpose(0, 1)
    return Dense(torch.where(used[:, None, :, None], rows, rows.new_zeros(())), lengths[:, None, None])


def _cached(k: torch.Tensor, v: torch.Tensor, modes: Modes, extras: Extras) -> tuple[Dense, torch.Tensor]:
    """Keys and values, dequantised, as (Dense keys, rows of values)."""
    if modes.lengths == "equal":
        return Dense(_scaled(k, extras.k_scale), None), _scaled(v, extras.v_scale)
    if extras.cu_seqlens_k is not None:
        longest = min(extras.max_seqlen_k, k.shape[2]) if extras.max_seqlen_k else k.shape[2]
        keys, values = (_unpacked(_comparable(one), extras.cu_seqlens_k, extras.cache_seqlens, longest) for one in (k, v))
    else:
        assert extras.cache_seqlens is not None
        keys, values = _from_cache(k, v, modes.page, extras.cache_seqlens.long(), extras)
    return Dense(_scaled(keys.rows, extras.k_scale), keys.lengths), _scaled(values.rows, extras.v_scale)


def _comparable(cache: torch.Tensor) -> torch.Tensor:
    """An e4m3 tensor in a dtype that PyTorch indexes and compares, exactly; another as it is."""
    return cache.to(torch.float32) if cache.dtype == torch.float8_e4m3fn else cache


def _scaled(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return _comparable(cache)
    return cache.float() * scale[:, :, None, None]


def _from_cache(k: torch.Tensor, v: torch.Tensor, page: int, lengths: torch.Tensor, extras: Extras) -> tuple[Dense, Dense]:
    batch = lengths.shape[0]
    capacity = k.shape[2] if extras.page_table is None else extras.page_table.shape[1] * page
    longest = min(capacity, extras.max_seqlen_k) if extras.max_seqlen_k else capacity
    lengths = lengths.clamp(max=longest)
    column = torch.arange(longest, device=k.device)
    used = column < lengths[:, None]  # [batch, longest]
    if extras.page_table is not None:
        where = torch.where(used, extras.page_table[:, column // page].long(), 0)
        found = [cache[where, :, column % page].transpose(1, 2) for cache in (k, v)]
    elif extras.cache_batch_idx is not None:
        found = [cache[:, :, :longest].index_select(0, extras.cache_batch_idx.long()) for cache in (k, v)]
    else:
        found = [cache[:batch, :, :longest] for cache in (k, v)]
    # What lies past a length may be NaN, and 0 * NaN is not 0.
    kept = used[:, None, :, None]
    keys, values = (torch.where(kept, one, one.new_zeros(())) for one in map(_comparable, found))
    return Dense(keys, lengths[:, None, None]), Dense(values, lengths[:, None, None])


def _packed_again(dense: torch.Tensor, q: torch.Tensor, modes: Modes, extras: Extras) -> torch.Tensor:
    """[batch, heads, longest, width] in the shape of ``q``: rows that belong to no sequence are zeros."""
    if modes.lengths != "packed":
        return dense
    assert extras.cu_seqlens_q is not None
    total = q.shape[2]
    if 0 in (total, *dense.shape):
        return dense.new_zeros(1, dense.shape[1], total, dense.shape[3])
    sequence, place, owned = owners(extras.cu_seqlens_q, total)
    rows = dense[sequence, :, place.clamp(max=dense.shape[2] - 1)]  # [total, heads, width]
    return torch.where(owned[:, None, None], rows, rows.new_zeros(())).transpose(0, 1).unsqueeze(0)


# The softmax -----------------------------------------------------------------------------------------------------------------


def _in_pieces(
    queries: Dense, keys: Dense, values: torch.Tensor, mask: Mask, modes: Modes, extras: Extras, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out fp32, log-sum-exp) of all rows, as many at once as ``_SCORES_AT_ONCE`` allows."""
    batch, heads, rows, _ = queries.rows.shape
    row_scores = max(1, batch * heads * keys.rows.shape[2])
    step = max(1, _SCORES_AT_ONCE // row_scores)
    if rows <= step:
        return _attend(queries, keys, values, mask, modes, extras, scale, 0, rows)
    pieces = [
        _attend(queries, keys, values, mask, modes, extras, scale, first, min(rows, first + step))
        for first in range(0, rows, step)
    ]
    return torch.cat([out for out, _ in pieces], 2), torch.cat([lse for _, lse in pieces], 2)


def _attend(
    queries: Dense,
    keys: Dense,
    values: torch.Tensor,
    mask: Mask,
    modes: Modes,
    extras: Extras,
    scale: float,
    first: int,
    last: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``first`` to ``last``: out [batch, heads, rows, head_dim_v] and log-sum-exp [batch, heads, rows], both fp32."""
    batch, heads, _, width = queries.rows.shape
    heads_kv, columns = keys.rows.shape[1], keys.rows.shape[2]
    grouped = (batch, heads_kv, heads // max(1, heads_kv), last - first)
    rows = queries.rows[:, :, first:last].float() * scale
    scores = rows.reshape(*grouped, width) @ keys.rows.float().mT.unsqueeze(2)
    scores = scores.reshape(batch, heads, last - first, columns)
    if extras.softcap:
        scores = extras.softcap * torch.tanh(scores / extras.softcap)
    visible, distance = _visible(queries, keys, mask, modes, extras, first, last)
    scores = _biased(scores, extras, distance, first, last)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if extras.sinks is not None:  # a column more, which has no value
        sink = extras.sinks.float()[:, None, None].expand(batch, heads, last - first, 1)
        scores = torch.cat((scores, sink), -1)
    with torch.no_grad():
        lse = scores.logsumexp(-1)
        empty = (lse == -torch.inf).unsqueeze(-1)
    # PyTorch's softmax, whose gradient is exact where one key has all the weight.
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)[..., :columns]
    out = weights.reshape(*grouped, columns) @ values.float().unsqueeze(2)
    return out.reshape(batch, heads, last - first, values.shape[3]), lse


def _biased(scores: torch.Tensor, extras: Extras, distance: torch.Tensor, first: int, last: int) -> torch.Tensor:
    columns = scores.shape[3]
    if extras.alibi_slopes is not None:
        scores = scores - extras.alibi_slopes[:, :, None, None] * distance.abs()[:, None]
    if extras.bias is not None:
        bias = extras.bias[:, :, first:last, :columns]
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.float()
    return scores


def _visible(
    queries: Dense, keys: Dense, mask: Mask, modes: Modes, extras: Extras, first: int, last: int
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Which keys each row sees, [batch or 1, 1, rows, keys] (None for all), and key - position [batch or 1, rows, keys]."""
    device = queries.rows.device
    of_q: torch.Tensor | int = queries.rows.shape[2] if queries.lengths is None else queries.lengths
    of_k: torch.Tensor | int = keys.rows.shape[2] if keys.lengths is None else keys.lengths
    column = torch.arange(keys.rows.shape[2], device=device)[None, None]
    row = torch.arange(first, last, device=device)[None, :, None]
    distance = column - (row + (of_k - of_q))
    limits: list[torch.Tensor] = []
    right = 0 if mask != "full" else modes.window_right
    if right is not None:
        limits.append(column <= row if mask == "causal-topleft" else distance <= right)
    if modes.window_left is not None:
        limits.append(distance >= -modes.window_left)
    if limits and extras.prefix is not None:
        band = limits[0] if len(limits) == 1 else limits[0] & limits[1]
        limits = [band | (column < extras.prefix.long()[:, None, None])]
    if isinstance(of_k, torch.Tensor):
        limits.append(column < of_k)
    if extras.leftpad is not None:
        limits.append(column >= extras.leftpad.long()[:, None, None])
    visible = None
    for limit in limits:
        visible = limit if visible is None else visible & limit
    return None if visible is None else visible[:, None], distance
