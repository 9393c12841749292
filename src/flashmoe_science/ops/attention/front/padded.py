"""Attention of sequences that are padded to one length, by PyTorch's operators: every feature, without waiting for a device.

Ragged, packed and paged tensors are gathered into [batch, heads, longest, head_dim] with zeros past each length, and one masked
softmax serves all sequences: PyTorch's own attention on a CPU, if it takes the features; else scores in fp32, or fp64 for fp64.
Page table entries past a length are replaced before they are used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from flashmoe_science.ops.attention.call.packed import owners
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.problem.features import Features
from flashmoe_science.ops.calls import is_transformed, needs_grad

# out, the log-sum-exp where it is asked for, and with it the weights where there is dropout.
_Rows = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
_WEIGHTS_AT_ONCE = 2**26  # 256 MiB of fp32 scores, the most that are held at a time where no gradient keeps them


class Dense(NamedTuple):
    """Sequences of one padded length. ``rows`` is [batch, heads, longest, head_dim] with zeros past each length; ``lengths`` is
    int64 [batch, 1, 1], or None where all have the longest."""

    rows: torch.Tensor
    lengths: torch.Tensor | None


class Softmax(NamedTuple):
    """What is done to the scores besides what ``Options`` and ``Tensors`` say."""

    scale: float
    dropout_p: float


def padded_attention(
    tensors: Tensors, options: Options, features: Features, softmax_scale: float | None, dropout_p: float
) -> _Rows:
    """The results of ``pytorch_attention`` and ``dropped_attention`` for a call with these features."""
    q = tensors.q
    queries = _queries(tensors, options)
    keys, values = _cached(tensors, options, features)
    softmax = Softmax(q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale, dropout_p)
    out, lse, weights = _in_parts(queries, keys, values, tensors, options, softmax)
    out = _packed_again(out, tensors).to(q.dtype)
    return out, None if lse is None else _packed_again(lse.unsqueeze(-1), tensors, -torch.inf).squeeze(-1), weights


def _queries(tensors: Tensors, options: Options) -> Dense:
    q = tensors.q
    if tensors.cu_seqlens_q is None:
        return Dense(q, None)
    return _unpacked(q, tensors.cu_seqlens_q, None, min(options.max_seqlen_q, q.shape[2]))


def _unpacked(packed: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor | None, longest: int) -> Dense:
    """[1, heads, total, head_dim] with int32 ``starts`` [batch + 1] as a Dense; ``lengths`` [batch] where they are not all."""
    starts = starts.long()
    held = starts[1:] - starts[:-1]
    lengths = held if lengths is None else torch.minimum(lengths.long(), held)
    column = torch.arange(longest, device=packed.device)
    used = column < lengths[:, None]  # [batch, longest]
    if packed.shape[2] == 0:
        packed = F.pad(packed, (0, 0, 0, 1))  # a row to read, so that what is read is part of the graph
    index = torch.where(used, starts[:-1, None] + column, 0)
    rows = packed[0, :, index].transpose(0, 1)
    return Dense(torch.where(used[:, None, :, None], rows, rows.new_zeros(())), lengths[:, None, None])


def _cached(tensors: Tensors, options: Options, features: Features) -> tuple[Dense, torch.Tensor]:
    """Keys and values, dequantised, as (Dense keys, rows of values)."""
    k, v, k_scale, v_scale = tensors.k, tensors.v, tensors.k_scale, tensors.v_scale
    if features.lengths == "equal":
        return Dense(_scaled(k, k_scale), None), _scaled(v, v_scale)
    if tensors.cu_seqlens_k is not None:
        longest = min(options.max_seqlen_k, k.shape[2]) if options.max_seqlen_k else k.shape[2]
        keys, values = (_unpacked(_comparable(one), tensors.cu_seqlens_k, tensors.cache_seqlens, longest) for one in (k, v))
    else:
        keys, values = _from_cache(tensors, options)
    return Dense(_scaled(keys.rows, k_scale), keys.lengths), _scaled(values.rows, v_scale)


def _comparable(cache: torch.Tensor) -> torch.Tensor:
    """An e4m3 tensor in a dtype that PyTorch indexes and compares, exactly; another as it is."""
    return cache.to(torch.float32) if cache.dtype == torch.float8_e4m3fn else cache


def _scaled(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return _comparable(cache)
    return wide(cache) * scale[:, :, None, None]


def _from_cache(tensors: Tensors, options: Options) -> tuple[Dense, Dense]:
    k, v, table = tensors.k, tensors.v, tensors.page_table
    assert tensors.cache_seqlens is not None
    lengths, page = tensors.cache_seqlens.long(), k.shape[2]
    capacity = page if table is None else table.shape[1] * page
    longest = min(capacity, options.max_seqlen_k) if options.max_seqlen_k else capacity
    lengths = lengths.clamp(max=longest)
    column = torch.arange(longest, device=k.device)
    used = column < lengths[:, None]  # [batch, longest]
    if table is not None:
        where = torch.where(used, table[:, column // page].long(), 0)
        found = [cache[where, :, column % page].transpose(1, 2) for cache in (k, v)]
    elif tensors.cache_batch_idx is not None:
        found = [cache[:, :, :longest].index_select(0, tensors.cache_batch_idx.long()) for cache in (k, v)]
    else:
        found = [cache[: lengths.shape[0], :, :longest] for cache in (k, v)]
    # What lies past a length may be NaN, and 0 * NaN is not 0.
    kept = used[:, None, :, None]
    keys, values = (torch.where(kept, one, one.new_zeros(())) for one in map(_comparable, found))
    return Dense(keys, lengths[:, None, None]), Dense(values, lengths[:, None, None])


def _packed_again(dense: torch.Tensor, tensors: Tensors, unowned: float = 0.0) -> torch.Tensor:
    """[batch, heads, longest, width] in the shape of ``q``, with ``unowned`` in rows that belong to no sequence."""
    if tensors.cu_seqlens_q is None:
        return dense
    total = tensors.q.shape[2]
    if 0 in (total, *dense.shape):
        # The sum is of nothing, but part of the graph.
        return dense.new_full((1, dense.shape[1], total, dense.shape[3]), unowned) + dense.sum()
    sequence, place, owned = owners(tensors.cu_seqlens_q, total)
    rows = dense[sequence, :, place.clamp(max=dense.shape[2] - 1)]  # [total, heads, width]
    return torch.where(owned[:, None, None], rows, rows.new_full((), unowned)).transpose(0, 1).unsqueeze(0)


def _in_parts(queries: Dense, keys: Dense, values: torch.Tensor, tensors: Tensors, options: Options, softmax: Softmax) -> _Rows:
    """The results of all rows, as many at once as ``_WEIGHTS_AT_ONCE`` allows."""
    batch, heads, rows, _ = queries.rows.shape
    attend = _by_pytorchs_own if _is_pytorchs_own(tensors, options) else _by_scores
    step = max(1, _WEIGHTS_AT_ONCE // max(1, batch * heads * keys.rows.shape[2]))
    if rows <= step:
        return attend(queries, keys, values, tensors, options, softmax, slice(0, rows))
    parts = [
        attend(queries, keys, values, tensors, options, softmax, slice(first, min(rows, first + step)))
        for first in range(0, rows, step)
    ]
    outs, lses, weights = ([one for one in of if one is not None] for of in zip(*parts, strict=True))
    return torch.cat(outs, 2), torch.cat(lses, 2) if lses else None, torch.cat(weights, 2) if weights else None


def _is_pytorchs_own(tensors: Tensors, options: Options) -> bool:
    """Whether PyTorch's own attention takes the features as a mask, and is known to be cheaper. On a CPU it gives zeros and no
    NaN gradients for rows without a key, but no gradient of a mask, no forward-mode gradient and no log-sum-exp."""
    return tensors.q.device.type == "cpu" and not (
        is_transformed()
        or options.return_lse
        or options.softcap
        or tensors.sinks is not None
        or needs_grad(tensors.alibi_slopes, tensors.bias)
    )


def _by_pytorchs_own(
    queries: Dense, keys: Dense, values: torch.Tensor, tensors: Tensors, options: Options, softmax: Softmax, part: slice
) -> _Rows:
    """The results of ``_by_scores`` without the log-sum-exp, in the dtype of keys and values."""
    visible, distance = _visible(queries, keys, tensors, options, part)
    mask = visible
    if tensors.alibi_slopes is not None:
        mask = -_slopes(tensors) * distance.abs()[:, None]
    elif tensors.bias is not None:
        mask = tensors.bias[:, :, part, : keys.rows.shape[2]]
    if mask is not None and visible is not None and mask is not visible:
        mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)
    rows, scale = positive_scale(queries.rows[:, :, part].to(keys.rows.dtype), softmax.scale)
    assert scale is not None
    gqa = bool(rows.shape[1] != keys.rows.shape[1])  # symbolic under torch.compile
    out = F.scaled_dot_product_attention(rows, keys.rows, values, mask, softmax.dropout_p, scale=scale, enable_gqa=gqa)
    return out, None, None


def positive_scale(q: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, float | None]:
    """(q, scale) with a scale above 0: PyTorch's CPU kernel masks before it scales, so that -inf would turn to +inf or NaN. A
    sign is exact in Q."""
    if scale is None or scale > 0.0:
        return q, scale
    return (-q, -scale) if scale < 0.0 else (q * 0.0, 1.0)


def _by_scores(
    queries: Dense, keys: Dense, values: torch.Tensor, tensors: Tensors, options: Options, softmax: Softmax, part: slice
) -> _Rows:
    """The rows of one part: out [batch, heads, rows, head_dim_v] and, if asked for, log-sum-exp [batch, heads, rows] and,
    with dropout, weights [batch, heads, rows, keys] in the dtype of Q, negative where they are left out."""
    batch, heads, _, width = queries.rows.shape
    heads_kv, columns, count = keys.rows.shape[1], keys.rows.shape[2], part.stop - part.start
    grouped = (batch, heads_kv, heads // max(1, heads_kv), count)
    rows = wide(queries.rows[:, :, part]) * softmax.scale
    scores = rows.reshape(*grouped, width) @ keys.rows.to(rows.dtype).mT.unsqueeze(2)
    scores = scores.reshape(batch, heads, count, columns)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    visible, distance = _visible(queries, keys, tensors, options, part)
    scores = _biased(scores, tensors, distance, part)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if tensors.sinks is not None:  # a column more, which has no value
        sink = tensors.sinks.to(scores.dtype)[:, None, None].expand(batch, heads, count, 1)
        scores = torch.cat((scores, sink), -1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    with torch.set_grad_enabled(torch.is_grad_enabled() and options.return_lse):
        lse = scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    # PyTorch's softmax, whose gradient is exact where one key has all the weight.
    weights = scores.softmax(-1).masked_fill(empty, 0.0)[..., :columns]
    shown = None
    if softmax.dropout_p:
        every, weights = weights, F.dropout(weights, softmax.dropout_p)
        if options.return_lse:
            shown = torch.where(weights == 0.0, -every, every).detach().to(tensors.q.dtype)
    out = weights.reshape(*grouped, columns) @ values.to(weights.dtype).unsqueeze(2)
    return out.reshape(batch, heads, count, values.shape[3]), lse if options.return_lse else None, shown


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in fp32; fp64 as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _slopes(tensors: Tensors) -> torch.Tensor:
    """[batch, heads, 1, 1], fp64 for an fp64 call, in which PyTorch's attention on a CPU would read an fp32 mask as fp64; else
    fp32."""
    assert tensors.alibi_slopes is not None
    return tensors.alibi_slopes.to(torch.promote_types(tensors.q.dtype, torch.float32))[:, :, None, None]


def _biased(scores: torch.Tensor, tensors: Tensors, distance: torch.Tensor, part: slice) -> torch.Tensor:
    if tensors.alibi_slopes is not None:
        scores = scores - _slopes(tensors) * distance.abs()[:, None]
    if tensors.bias is not None:
        bias = tensors.bias[:, :, part, : scores.shape[3]]
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.to(scores.dtype)
    return scores


def _visible(
    queries: Dense, keys: Dense, tensors: Tensors, options: Options, part: slice
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Which keys each row sees, [batch or 1, 1, rows, keys] (None for all), and key - position [batch or 1, rows, keys]."""
    device = queries.rows.device
    of_q: torch.Tensor | int = queries.rows.shape[2] if queries.lengths is None else queries.lengths
    of_k: torch.Tensor | int = keys.rows.shape[2] if keys.lengths is None else keys.lengths
    column = torch.arange(keys.rows.shape[2], device=device)[None, None]
    row = torch.arange(part.start, part.stop, device=device)[None, :, None]
    distance = column - (row + (of_k - of_q))
    limits: list[torch.Tensor] = []
    right = 0 if options.mask != "full" else options.window_right
    if right is not None:
        limits.append(column <= row if options.mask == "causal-topleft" else distance <= right)
    if options.window_left is not None:
        limits.append(distance >= -options.window_left)
    if limits and tensors.prefix is not None:
        band = limits[0] if len(limits) == 1 else limits[0] & limits[1]
        limits = [band | (column < tensors.prefix.long()[:, None, None])]
    if isinstance(of_k, torch.Tensor):
        limits.append(column < of_k)
    if tensors.leftpad is not None:
        limits.append(column >= tensors.leftpad.long()[:, None, None])
    visible = None
    for limit in limits:
        visible = limit if visible is None else visible & limit
    return None if visible is None else visible[:, None], distance
