"""Attention computed to be right, not fast: an fp64 oracle, and the same maths done plainly in the input dtype.

Sequence by sequence: its keys and values are gathered from a cache, from pages or from packed ones, its scores capped, biased
and masked. It works in chunks of key heads and of queries, and leaves out keys that no query of a chunk may see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashmoe_science.ops.attention.call.kernel import AttentionInputs
from flashmoe_science.ops.plain import plain_product, without_tf32

CHUNK_SCORES = 2**25  # scores in memory at once: 256 MiB in fp64
_PLAIN_CHUNK_SCORES = 2**26


class Rules(NamedTuple):
    """What some get wrong beyond another argument: a cap of the mask too, a causal mask that begins at the first key."""

    cap_after_mask: bool = False
    top_left: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: q [heads, queries, head_dim], k and v [heads_kv, keys, head_dim], views or gathered. Keys before ``first``
    are padding; query ``i`` stands at key ``i + offset``; its results go to rows from ``row`` on of ``place``."""

    index: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    first: int
    offset: int
    place: int
    row: int


def sequences(inputs: AttentionInputs, rules: Rules | None = None) -> Iterator[Sequence]:
    """The sequences of a call, those without queries left out."""
    problem, tensors = inputs.problem, inputs.tensors
    starts = None if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.tolist()
    pads = None if tensors.leftpad is None else tensors.leftpad.tolist()
    batch = problem.batch if starts is None else len(starts) - 1
    top_left = problem.mask == "causal-topleft" or (rules is not None and rules.top_left)
    lengths = None if tensors.cache_seqlens is None else tensors.cache_seqlens.tolist()
    for index in range(batch):
        row, end = (0, problem.seqlen_q) if starts is None else starts[index : index + 2]
        if row == end:
            continue
        place = index if starts is None else 0
        k, v = (_keys(inputs, tensor, index, lengths) for tensor in (inputs.k, inputs.v))
        offset = 0 if top_left else k.shape[1] - (end - row)
        first = 0 if pads is None else pads[index]
        yield Sequence(index, inputs.q[place, :, row:end], k, v, first, offset, place, row)


def _keys(inputs: AttentionInputs, tensor: torch.Tensor, index: int, lengths: list[int] | None) -> torch.Tensor:
    """The rows of K or V of one sequence, [heads_kv, keys, width]. Raises IndexError where a table names no page."""
    tensors = inputs.tensors
    if tensors.cu_seqlens_k is not None:
        start, end = tensors.cu_seqlens_k[index : index + 2].tolist()
        return tensor[0, :, start : end if lengths is None else min(end, start + lengths[index])]
    if lengths is None:
        return tensor[index]
    keys = lengths[index]
    if tensors.page_table is None:
        row = index if tensors.cache_batch_idx is None else int(tensors.cache_batch_idx[index])
        return tensor[row, :, :keys]
    pages = tensors.page_table[index, : -(-keys // tensor.shape[2])].long()
    gathered = _indexed(tensor, pages)  # [pages, heads_kv, page, width]
    return gathered.transpose(0, 1).flatten(1, 2)[:, :keys]


def _indexed(tensor: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() > 1:
        return tensor[pages]
    return tensor.view(torch.uint8)[pages].view(tensor.dtype)  # 8-bit floats have no gather


def _scaled(inputs: AttentionInputs, one: Sequence, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a sequence times the scales of an e4m3 cache, in ``wide``."""
    k, v = one.k.to(wide), one.v.to(wide)
    tensors = inputs.tensors
    if tensors.k_scale is not None:
        k = k * tensors.k_scale[one.index].to(wide)[:, None, None]
    if tensors.v_scale is not None:
        v = v * tensors.v_scale[one.index].to(wide)[:, None, None]
    return k, v


class Chunk(NamedTuple):
    """Query rows ``first`` to ``last`` of ``heads`` (of keys), which may see keys ``low`` to ``high``."""

    heads: slice
    first: int
    last: int
    low: int
    high: int


def chunks_of(inputs: AttentionInputs, one: Sequence, limit: int, every_key: bool) -> Iterator[Chunk]:
    heads_kv, keys = one.k.shape[0], one.k.shape[1]
    heads, queries, _ = one.q.shape
    group = heads // heads_kv
    step = max(1, min(heads_kv, limit // max(1, group * queries * keys)))
    rows = queries if step > 1 else max(1, min(queries, limit // max(1, group * keys)))
    for head in range(0, heads_kv, step):
        for first in range(0, queries, rows):
            last = min(first + rows, queries)
            low, high = (0, keys) if every_key else _reach(inputs, one, first, last)
            yield Chunk(slice(head, min(head + step, heads_kv)), first, last, low, high)


def _reach(inputs: AttentionInputs, one: Sequence, first: int, last: int) -> tuple[int, int]:
    """The keys that rows ``first`` to ``last`` may see."""
    features, keys = inputs.problem.features, one.k.shape[1]
    low, high = min(one.first, keys), keys
    if features.window_left is not None and not _prefix(inputs, one):
        low = min(keys, max(low, first + one.offset - features.window_left))
    right = 0 if inputs.problem.causal else features.window_right
    if right is not None:
        high = min(keys, max(last + one.offset + right, _prefix(inputs, one)))
    return low, max(low, high)


def _prefix(inputs: AttentionInputs, one: Sequence) -> int:
    return 0 if inputs.tensors.prefix is None or not inputs.problem.features.prefix else int(inputs.tensors.prefix[one.index])


def _hidden(inputs: AttentionInputs, one: Sequence, chunk: Chunk) -> torch.Tensor:
    """True where a query may not see a key: [rows, keys], or [heads_kv, group, rows, keys] under a boolean mask."""
    problem, features = inputs.problem, inputs.problem.features
    here = torch.arange(chunk.first, chunk.last, device=one.q.device)[:, None] + one.offset
    key = torch.arange(chunk.low, chunk.high, device=one.q.device)[None, :]
    hidden = (key < one.first).expand(len(here), -1)
    behind = key >= _prefix(inputs, one)
    right = 0 if problem.causal else features.window_right
    if right is not None:
        hidden = hidden | ((key > here + right) & behind)
    if features.window_left is not None:
        hidden = hidden | ((key < here - features.window_left) & behind)
    if features.bias == "boolean":
        hidden = hidden | ~_bias(inputs, one, chunk)
    return hidden


def grouped(of_heads: torch.Tensor, one: Sequence) -> torch.Tensor:
    """[heads, ...] seen as [heads_kv, group, ...]."""
    grouped: torch.Tensor = of_heads.unflatten(0, (one.k.shape[0], -1))
    return grouped


def _bias(inputs: AttentionInputs, one: Sequence, chunk: Chunk) -> torch.Tensor:
    """The part of the bias tensor that belongs to a chunk: [heads_kv, group, rows, keys]."""
    assert inputs.tensors.bias is not None
    return grouped(inputs.tensors.bias[one.index], one)[chunk.heads, :, chunk.first : chunk.last, chunk.low : chunk.high]


def scores_of(
    inputs: AttentionInputs,
    one: Sequence,
    chunk: Chunk,
    k: torch.Tensor,
    wide: torch.dtype,
    rules: Rules,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> torch.Tensor:
    """Scores of a chunk in ``wide``, with all but the sink: [heads_kv, group, rows, keys]. Each step is rounded to ``wide``."""
    features = inputs.problem.features
    queries = grouped(one.q, one)[chunk.heads, :, chunk.first : chunk.last].to(wide)
    keys = (k[chunk.heads, None, chunk.low : chunk.high] * inputs.softmax_scale).transpose(-1, -2)
    scores = product(queries, keys)
    hidden = _hidden(inputs, one, chunk)
    cap = inputs.options.softcap if features.softcap else 0.0
    if rules.cap_after_mask:
        scores = scores.masked_fill(hidden, -torch.inf)
    if cap:
        scores = torch.tanh(scores / cap) * cap  # not in place: proof/backward differentiates it
    if features.bias in ("alibi", "additive"):
        more = _alibi(inputs, one, chunk) if features.bias == "alibi" else _bias(inputs, one, chunk)
        sums = scores + more if wide == torch.float64 else scores.float() + more.float()
        scores = sums.to(wide)
    return scores if rules.cap_after_mask else scores.masked_fill_(hidden, -torch.inf)


def _alibi(inputs: AttentionInputs, one: Sequence, chunk: Chunk) -> torch.Tensor:
    assert inputs.tensors.alibi_slopes is not None
    slopes = grouped(inputs.tensors.alibi_slopes[one.index].double(), one)[chunk.heads]
    here = torch.arange(chunk.first, chunk.last, device=slopes.device)[:, None] + one.offset
    away = (here - torch.arange(chunk.low, chunk.high, device=slopes.device)[None, :]).abs()
    return -slopes[..., None, None] * away


def _norm(inputs: AttentionInputs, one: Sequence, chunk: Chunk, scores: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of scores and sinks, [heads_kv, group, rows, 1]; -inf where there is neither."""
    norm = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if scores.shape[-1]:
        norm = torch.logsumexp(scores, -1, keepdim=True)
    sinks = _sinks(inputs, one, chunk)
    return norm if sinks is None else torch.logaddexp(norm, sinks.to(norm.dtype))


def _sinks(inputs: AttentionInputs, one: Sequence, chunk: Chunk) -> torch.Tensor | None:
    sinks = inputs.tensors.sinks if inputs.problem.features.sinks else None
    return None if sinks is None else grouped(sinks, one)[chunk.heads, :, None, None]


def attention_oracle(inputs: AttentionInputs, rules: Rules | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention in fp64. Returns out [B, H, Sq, Dv] and lse [B, H, Sq] (natural log, sinks included), both fp64, in the
    shape of Q: [1, H, total, ...] of packed sequences. A row that sees no key is zeros; its lse is -inf, or the sink."""
    used = rules or Rules()
    out, lse = _empty(inputs, torch.float64, torch.float64)
    for one in sequences(inputs, used):
        k, v = _scaled(inputs, one, torch.float64)
        for chunk in chunks_of(inputs, one, CHUNK_SCORES, used.cap_after_mask):
            scores = scores_of(inputs, one, chunk, k, torch.float64, used)
            norm = _norm(inputs, one, chunk, scores)
            scores.sub_(torch.where(norm == -torch.inf, 0.0, norm)).exp_()
            _put(out, one, chunk, scores @ v[chunk.heads, None, chunk.low : chunk.high])
            _put(lse, one, chunk, norm[..., 0])
    return out, lse


@without_tf32()
def attention_plain(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The same maths in the dtype of Q, each step rounded to it: what an honest kernel must not be much worse than.

    K is scaled in place of Q, so that the order of operations differs from a kernel's (as FlashAttention's tests do). An e4m3
    cache is dequantised to the dtype of Q first. The log-sum-exp is done in fp32 throughout, which is what a kernel that
    returns it in fp32 has to match. Returns out in the dtype of Q, lse in fp32, shaped as ``attention_oracle`` gives them.
    """
    dtype, none = inputs.q.dtype, Rules()
    product = plain_product(dtype, inputs.q.device)
    out, lse = _empty(inputs, dtype, torch.float32)
    for one in sequences(inputs):
        k32, v32 = _scaled(inputs, one, torch.float32)
        k, v = k32.to(dtype), v32.to(dtype)
        for chunk in chunks_of(inputs, one, _PLAIN_CHUNK_SCORES, False):
            scores = scores_of(inputs, one, chunk, k, dtype, none, product)
            column = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
            sinks = _sinks(inputs, one, chunk)
            if sinks is not None:
                column.copy_(sinks)
            scores = torch.cat((scores, column), -1)
            if dtype == torch.float32:  # by way of the log-sum-exp, which merges of split keys round too
                weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))
            else:
                weights = torch.softmax(scores, -1)
            weights = weights[..., :-1].nan_to_num(nan=0.0)  # NaN: a row that sees nothing
            _put(out, one, chunk, product(weights, v[chunk.heads, None, chunk.low : chunk.high]))
            scores32 = scores_of(inputs, one, chunk, k32, torch.float32, none)
            _put(lse, one, chunk, _norm(inputs, one, chunk, scores32)[..., 0])
    return out, lse


def _empty(inputs: AttentionInputs, dtype: torch.dtype, of_lse: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows = inputs.q.shape[:3]
    out = torch.zeros((*rows, inputs.v.shape[-1]), dtype=dtype, device=inputs.q.device)
    return out, torch.full(rows, -math.inf, dtype=of_lse, device=inputs.q.device)


def _put(result: torch.Tensor, one: Sequence, chunk: Chunk, values: torch.Tensor) -> None:
    """Write what was computed of a chunk where it belongs."""
    grouped(result[one.place], one)[chunk.heads, :, one.row + chunk.first : one.row + chunk.last] = values


def extents(inputs: AttentionInputs) -> tuple[float, float, float]:
    """The largest norm of a key, the largest value and the values' RMS, of the keys and values that a call may use."""
    key, value, squares, count = 0.0, 0.0, 0.0, 0
    for one in sequences(inputs):
        k, v = (tensor[:, one.first :] for tensor in _scaled(inputs, one, torch.float32))
        if k.numel():
            key = max(key, torch.linalg.vector_norm(k, dim=-1).max().item())
            value = max(value, v.abs().max().item())
            squares, count = squares + v.double().square().sum().item(), count + v.numel()
    return key, value, math.sqrt(squares / max(1, count))
