"""Attention by PyTorch's operators: differentiable, on any device, every feature, and without waiting for a GPU.

It serves what our kernels do not: tensors on the CPU, inputs that need gradients, dropout, fp64, other GPUs than NVIDIA's.
Calls without features are PyTorch's own attention. Sequences of unequal lengths are one such call each if that is cheaper and
their lengths may be read, on the CPU; else they are padded to one length (padded.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import mul
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from flashmoe_science.ops.attention.call.lengths import lengths_of
from flashmoe_science.ops.attention.call.outputs import Result
from flashmoe_science.ops.attention.call.tensors import Given, Options, Tensors, features_of, sequences
from flashmoe_science.ops.attention.front.lengths import are_readable, refuse_lengths
from flashmoe_science.ops.attention.front.padded import padded_attention, positive_scale, wide
from flashmoe_science.ops.attention.problem import Mask
from flashmoe_science.ops.attention.problem.features import PLAIN
from flashmoe_science.ops.calls import is_transformed, needs_grad, without_autocast
from flashmoe_science.ops.private import any_autocast

_SCORES_AT_ONCE = 2**24  # 64 MiB of fp32 scores, the most that the log-sum-exp holds at a time
_SCORES_OF_A_CALL = 2**15  # what a call costs apart from its scores, in scores


def pytorch_attention(tensors: Tensors, options: Options, softmax_scale: float | None, dropout_p: float = 0) -> Result:
    """softmax(cap(Q K^T * scale) + bias, masked, with the sinks) V, differentiable in Q, K, V, the sinks, slopes and biases.

    Args:
        softmax_scale: None for head_dim ** -0.5.
        dropout_p: the share of weights that are dropped; the others grow to match. The log-sum-exp covers all.

    Returns:
        out in the shape of ``q`` with the width of ``v`` and the dtype of ``q``; a row that sees no key gets zeros. lse as
        ``out`` without its last dimension, fp32, natural log, -inf for a row that sees neither a key nor a sink; None if not
        asked for.
    """
    features = features_of(tensors, options)
    with without_autocast(tensors.q):  # it would give an output of another dtype than the inputs'
        if features == PLAIN:
            return _plain(tensors, options, softmax_scale, dropout_p)
        if features.lengths != "equal":
            refuse_lengths(lengths_of(tensors, options))
            if are_readable(*tensors) and 0 not in (tensors.q.numel(), tensors.k.numel()):
                spans = _spans(tensors)
                if _is_cheaper_alone(spans, tensors.q.shape[1]):
                    return _one_by_one(spans, tensors, options, softmax_scale, dropout_p)
        return padded_attention(tensors, options, features, softmax_scale, dropout_p)[:2]


def bind_pytorch(tensors: Tensors, options: Options) -> Callable[[Given, float | None], Result]:
    """``pytorch_attention`` for tensors like these, called with tensors and a scale. If PyTorch's own function computes the
    whole call, it is called directly."""
    (_, heads, rows, _), (_, heads_kv, keys, _) = tensors.q.shape, tensors.k.shape
    shifted = options.mask == "causal" and rows != keys  # PyTorch's diagonal begins at the first key
    more = options.return_lse or shifted or any_autocast() or 0 in (*tensors.q.shape, *tensors.k.shape)
    direct, causal, gqa = not more and features_of(tensors, options) == PLAIN, options.mask != "full", heads != heads_kv

    def call(tensors: Given, scale: float | None) -> Result:
        if not direct or (scale is not None and scale <= 0.0):
            return pytorch_attention(Tensors(*tensors), options, scale)  # type: ignore[arg-type]  # q, k and v are never None
        q, k, v = tensors[0], tensors[1], tensors[2]
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa), None  # type: ignore[arg-type]

    return call


def dropped_attention(
    tensors: Tensors, options: Options, softmax_scale: float | None, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The results of ``pytorch_attention`` and, if the log-sum-exp is asked for, the weights before dropout, [batch, heads,
    longest q, longest k], in the dtype of ``q``; dropped ones are negative."""
    if not (options.return_lse and dropout_p):
        return *pytorch_attention(tensors, options, softmax_scale, dropout_p), None
    features = features_of(tensors, options)
    refuse_lengths(lengths_of(tensors, options))
    with without_autocast(tensors.q):
        return padded_attention(tensors, options, features, softmax_scale, dropout_p)


# Each sequence by itself ------------------------------------------------------------------------------------------------------


class _Spans(NamedTuple):
    """Each sequence's number of queries, and its keys from ``first`` to ``last``."""

    queries: list[int]
    first: list[int]
    last: list[int]


def _spans(tensors: Tensors) -> _Spans:
    """The spans of a call's sequences. Reads lengths from the device."""
    batch, starts_q, starts_k = sequences(tensors), tensors.cu_seqlens_q, tensors.cu_seqlens_k
    queries = [tensors.q.shape[2]] * batch if starts_q is None else starts_q.diff().tolist()
    last = starts_k.diff() if tensors.cache_seqlens is None and starts_k is not None else tensors.cache_seqlens
    assert last is not None
    return _Spans(queries, [0] * batch if tensors.leftpad is None else tensors.leftpad.tolist(), last.tolist())


def _is_cheaper_alone(spans: _Spans, heads: int) -> bool:
    """Whether one call a sequence costs less than one padded call, whose mask doubles its cost."""
    batch, scores = len(spans.queries), sum(map(mul, spans.queries, spans.last))
    padded = batch * max(spans.queries) * max(spans.last)
    return bool(heads * scores + batch * _SCORES_OF_A_CALL < 2 * heads * padded)


def _one_by_one(spans: _Spans, tensors: Tensors, options: Options, softmax_scale: float | None, dropout_p: float) -> Result:
    """The results of ``pytorch_attention``, one call a sequence. Rows of no sequence get zeros, and -inf."""
    packed, of_one = tensors.cu_seqlens_q is not None, options._replace(max_seqlen_q=0, max_seqlen_k=0)
    rows = _split(tensors.q, spans.queries) if packed else tensors.q.split(1)
    results = []
    for n, (q, k, v, count, first, last) in enumerate(zip(rows, *_keys(tensors, spans), *spans, strict=True)):
        slopes, prefix, k_scale, v_scale = (
            None if one is None else one[n : n + 1]
            for one in (tensors.alibi_slopes, tensors.prefix, tensors.k_scale, tensors.v_scale)
        )
        own = Tensors(
            q, k[:, :, first:last], v[:, :, first:last], sinks=tensors.sinks, alibi_slopes=slopes,
            bias=None if tensors.bias is None else tensors.bias[n : n + 1, :, :count, first:last],
            prefix=None if prefix is None else prefix - first, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        results.append(pytorch_attention(own, of_one, softmax_scale, dropout_p))
    rest = tensors.q.shape[2] - sum(spans.queries) if packed else 0
    out = torch.cat([one for one, _ in results], 2 if packed else 0)
    lses = [one for _, one in results if one is not None]
    lse = F.pad(torch.cat(lses, 2 if packed else 0), (0, rest), value=-torch.inf) if lses else None
    return F.pad(out, (0, 0, 0, rest)), lse


def _keys(tensors: Tensors, spans: _Spans) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Keys and values of each sequence from its first row on, [1, heads, rows, width]."""
    k, v, table = tensors.k, tensors.v, tensors.page_table
    if tensors.cu_seqlens_k is not None:
        held = tensors.cu_seqlens_k.diff().tolist()
        return _split(k, held), _split(v, held)
    if table is None:
        index = range(len(spans.last)) if tensors.cache_batch_idx is None else tensors.cache_batch_idx.tolist()
        rows_k, rows_v = k.split(1), v.split(1)
        return [rows_k[row] for row in index], [rows_v[row] for row in index]
    pages = [row[: -(-last // k.shape[2])] for row, last in zip(table.long(), spans.last, strict=True)]
    of_k, of_v = ([one[own].transpose(0, 1).flatten(1, 2)[None] for own in pages] for one in (k, v))
    return of_k, of_v


def _split(packed: torch.Tensor, lengths: list[int]) -> Sequence[torch.Tensor]:
    """[1, heads, total, width] by sequence, in one differentiable step; rows of no sequence are left out."""
    parts: tuple[torch.Tensor, ...] = packed.split([*lengths, packed.shape[2] - sum(lengths)], 2)
    return parts[:-1]


# PyTorch's own attention ------------------------------------------------------------------------------------------------------


def _plain(tensors: Tensors, options: Options, softmax_scale: float | None, dropout_p: float) -> Result:
    q, k, v, mask = tensors.q, tensors.k, tensors.v, options.mask
    if 0 in (*q.shape, *k.shape):
        return _nothing(q, k, v, options.return_lse)
    out = _output(q, k, v, mask, softmax_scale, dropout_p)
    if not options.return_lse:
        return out, None
    if needs_grad(q, k) and not is_transformed():
        return out, _LogSumExp.apply(q, k, mask, softmax_scale)  # type: ignore[no-untyped-call]
    return out, _log_sum_exp(q, k, mask, softmax_scale)


def _nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool) -> Result:
    """The result without queries or keys: zeros and -inf, part of the graph like any output."""
    group = q.shape[1] // max(1, k.shape[1])
    k, v = (tensor.repeat_interleave(group, 1)[:, :, :0] for tensor in (k, v))
    out = (q @ k.mT) @ v  # a sum over no keys
    return out, wide(q[..., :0]).sum(-1) - torch.inf if return_lse else None  # of no column


def _output(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float | None, dropout_p: float
) -> torch.Tensor:
    queries, keys = q.shape[2], k.shape[2]
    q, scale = positive_scale(q, scale)
    gqa = bool(q.shape[1] != k.shape[1])  # symbolic under torch.compile
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout_p, scale=scale, enable_gqa=gqa)
    if mask == "full":
        return attend(q, k, v)
    if mask == "causal-topleft" or queries == keys:
        return attend(q, k, v, is_causal=True)
    if queries > keys:
        # The first queries see no key. The rest is a square causal problem, which needs no mask tensor.
        blind = queries - keys
        seeing = attend(q[:, :, blind:], k, v, is_causal=True)
        return F.pad(seeing, (0, 0, blind, 0))
    visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return attend(q, k, v, attn_mask=visible)


def _log_sum_exp(q: torch.Tensor, k: torch.Tensor, mask: Mask, scale: float | None) -> torch.Tensor:
    batch, heads, queries, width = q.shape
    heads_kv, keys = k.shape[1], k.shape[2]
    grouped = q.reshape(batch, heads_kv, heads // heads_kv, queries, width)
    keys_t = wide(k).mT.unsqueeze(2)  # [batch, heads_kv, 1, head_dim, seqlen_k]
    factor = width**-0.5 if scale is None else scale
    offset = keys - queries if mask == "causal" else 0
    step = max(1, _SCORES_AT_ONCE // (batch * heads * keys))
    chunks = []
    for first in (0,) if queries <= step else range(0, queries, step):  # a range is of one length to torch.compile
        rows = wide(grouped[:, :, :, first : first + step])
        scores = (rows * factor) @ keys_t
        if mask != "full":
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(first + offset)
            scores = scores.masked_fill_(~visible, float("-inf"))
        empty = (scores == -torch.inf).all(-1)  # which has no gradient, and else would have NaN
        chunks.append(scores.masked_fill(empty[..., None], 0.0).logsumexp(-1).masked_fill(empty, -torch.inf).flatten(1, 2))
    return torch.cat(chunks, dim=-1)


class _LogSumExp(torch.autograd.Function):
    """``_log_sum_exp``, whose backward recomputes the scores instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, mask: Mask, scale: float | None) -> torch.Tensor:
        ctx.save_for_backward(q, k)
        ctx.call = mask, scale
        return _log_sum_exp(q, k, mask, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        q, k = ctx.saved_tensors
        if not torch.is_grad_enabled():  # else the gradient is to be differentiated, of these very tensors
            q, k = (one.detach().requires_grad_() for one in (q, k))
        with torch.enable_grad():
            lse = _log_sum_exp(q, k, *ctx.call)
        needed = [one for one, wanted in zip((q, k), ctx.needs_input_grad, strict=False) if wanted]
        found = iter(torch.autograd.grad(lse, needed, gradient, create_graph=torch.is_grad_enabled()))
        return (*(next(found) if wanted else None for wanted in ctx.needs_input_grad[:2]), None, None)
