"""Attention by PyTorch's operators: differentiable, on any device, every feature, and without waiting for a device.

It serves what our kernels do not: tensors on the CPU, inputs that need gradients, GPUs that are not NVIDIA's. Calls without
features are PyTorch's own attention. For the others ragged, packed and paged tensors are gathered into [batch, heads, longest,
head_dim] with zeros past each length, scores are fp32, and one masked softmax serves all sequences. Entries of a page table
past a length are replaced before they are used as an address.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from flashmoe_science.ops.attention.call.lengths import lengths_of
from flashmoe_science.ops.attention.call.outputs import Result
from flashmoe_science.ops.attention.call.packed import owners
from flashmoe_science.ops.attention.call.tensors import Options, Tensors, features_of
from flashmoe_science.ops.attention.front.lengths import refuse_lengths
from flashmoe_science.ops.attention.problem import Mask
from flashmoe_science.ops.attention.problem.features import PLAIN, Features
from flashmoe_science.ops.calls import without_autocast

_SCORES_AT_ONCE = 2**24  # 64 MiB of fp32 scores, the most that the log-sum-exp holds at a time
_WEIGHTS_AT_ONCE = 2**26  # 256 MiB of fp32 scores, the most that are held at a time where no gradient keeps them


def pytorch_attention(tensors: Tensors, options: Options, softmax_scale: float | None) -> Result:
    """softmax(cap(Q K^T * scale) + bias, masked, with the sinks) V, differentiable in Q, K, V, the sinks, slopes and biases.

    Args:
        softmax_scale: None for head_dim ** -0.5.

    Returns:
        out in the shape of ``q`` with the width of ``v`` and the dtype of ``q``; a row that sees no key gets zeros. lse as
        ``out`` without its last dimension, fp32, natural log, -inf for a row that sees neither a key nor a sink, without a
        gradient; None where it is not asked for.
    """
    features = features_of(tensors, options)
    with without_autocast(tensors.q):  # it would give an output of another dtype than the inputs'
        if features == PLAIN:
            return _plain(tensors, options, softmax_scale)
        return _with_features(tensors, options, features, softmax_scale)


# PyTorch's own attention ------------------------------------------------------------------------------------------------------


def _plain(tensors: Tensors, options: Options, softmax_scale: float | None) -> Result:
    q, k, v, mask = tensors.q, tensors.k, tensors.v, options.mask
    if 0 in (*q.shape, *k.shape):
        return _nothing(q, k, v, options.return_lse)
    out = _output(q, k, v, mask, softmax_scale)
    return out, _log_sum_exp(q, k, mask, softmax_scale) if options.return_lse else None


def _nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool) -> Result:
    """The result where there is no query or no key: zeros, part of the graph as any output is, and -inf."""
    group = q.shape[1] // max(1, k.shape[1])
    k, v = (tensor.repeat_interleave(group, 1)[:, :, :0] for tensor in (k, v))
    out = (q @ k.mT) @ v  # a sum over no keys
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32) if return_lse else None
    return out, lse


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


# Every feature ----------------------------------------------------------------------------------------------------------------


class Dense(NamedTuple):
    """Sequences of one padded length. ``rows`` is [batch, heads, longest, head_dim] with zeros past each length; ``lengths`` is
    int64 [batch, 1, 1], or None where all have the longest."""

    rows: torch.Tensor
    lengths: torch.Tensor | None


def _with_features(tensors: Tensors, options: Options, features: Features, softmax_scale: float | None) -> Result:
    refuse_lengths(lengths_of(tensors, options))
    q = tensors.q
    queries = _queries(tensors, options)
    keys, values = _cached(tensors, options, features)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _in_parts(queries, keys, values, tensors, options, scale)
    out = _packed_again(out, tensors).to(q.dtype)
    return out, _packed_again(lse.unsqueeze(-1), tensors).squeeze(-1) if options.return_lse else None


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
        return Dense(packed.new_zeros(used.shape[0], packed.shape[1], longest, packed.shape[3]), lengths[:, None, None])
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
    return cache.float() * scale[:, :, None, None]


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


def _packed_again(dense: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """[batch, heads, longest, width] in the shape of ``q``: rows that belong to no sequence are zeros."""
    if tensors.cu_seqlens_q is None:
        return dense
    total = tensors.q.shape[2]
    if 0 in (total, *dense.shape):
        return dense.new_zeros(1, dense.shape[1], total, dense.shape[3])
    sequence, place, owned = owners(tensors.cu_seqlens_q, total)
    rows = dense[sequence, :, place.clamp(max=dense.shape[2] - 1)]  # [total, heads, width]
    return torch.where(owned[:, None, None], rows, rows.new_zeros(())).transpose(0, 1).unsqueeze(0)


def _in_parts(
    queries: Dense, keys: Dense, values: torch.Tensor, tensors: Tensors, options: Options, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out fp32, log-sum-exp) of all rows, as many at once as ``_WEIGHTS_AT_ONCE`` allows."""
    batch, heads, rows, _ = queries.rows.shape
    step = max(1, _WEIGHTS_AT_ONCE // max(1, batch * heads * keys.rows.shape[2]))
    if rows <= step:
        return _attend(queries, keys, values, tensors, options, scale, slice(0, rows))
    parts = [
        _attend(queries, keys, values, tensors, options, scale, slice(first, min(rows, first + step)))
        for first in range(0, rows, step)
    ]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _attend(
    queries: Dense, keys: Dense, values: torch.Tensor, tensors: Tensors, options: Options, scale: float, part: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one part: out [batch, heads, rows, head_dim_v] and log-sum-exp [batch, heads, rows], both fp32."""
    batch, heads, _, width = queries.rows.shape
    heads_kv, columns, count = keys.rows.shape[1], keys.rows.shape[2], part.stop - part.start
    grouped = (batch, heads_kv, heads // max(1, heads_kv), count)
    rows = queries.rows[:, :, part].float() * scale
    scores = rows.reshape(*grouped, width) @ keys.rows.float().mT.unsqueeze(2)
    scores = scores.reshape(batch, heads, count, columns)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    visible, distance = _visible(queries, keys, tensors, options, part)
    scores = _biased(scores, tensors, distance, part)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if tensors.sinks is not None:  # a column more, which has no value
        sink = tensors.sinks.float()[:, None, None].expand(batch, heads, count, 1)
        scores = torch.cat((scores, sink), -1)
    with torch.no_grad():
        lse = scores.logsumexp(-1)
        empty = (lse == -torch.inf).unsqueeze(-1)
    # PyTorch's softmax, whose gradient is exact where one key has all the weight.
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)[..., :columns]
    out = weights.reshape(*grouped, columns) @ values.float().unsqueeze(2)
    return out.reshape(batch, heads, count, values.shape[3]), lse


def _biased(scores: torch.Tensor, tensors: Tensors, distance: torch.Tensor, part: slice) -> torch.Tensor:
    if tensors.alibi_slopes is not None:
        scores = scores - tensors.alibi_slopes[:, :, None, None] * distance.abs()[:, None]
    if tensors.bias is not None:
        bias = tensors.bias[:, :, part, : scores.shape[3]]
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.float()
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
