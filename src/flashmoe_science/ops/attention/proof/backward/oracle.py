"""Gradients computed to be right, not fast: autograd of the forward's oracle, in fp64 or in the input dtype, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import NamedTuple

import torch

from flashmoe_science.contract import unit_roundoff
from flashmoe_science.ops.attention.call.backward import BackwardInputs, Wanted, unexpanded
from flashmoe_science.ops.attention.call.kernel import AttentionInputs
from flashmoe_science.ops.attention.proof.oracle import (
    CHUNK_SCORES,
    Chunk,
    Rules,
    Sequence,
    chunks_of,
    grouped,
    scores_of,
    sequences,
)
from flashmoe_science.ops.plain import without_tf32

_FLUSHED = torch.finfo(torch.float32).tiny  # below it GPUs may take an fp32 number for 0

Made = tuple[torch.Tensor, ...]  # those of a Wanted that are, in its order


def backward_oracle(inputs: BackwardInputs) -> Made:
    """The wanted gradients in fp64. ``dbias`` is summed over what the bias is expanded by."""
    return _gradients(inputs, torch.float64)


def backward_plain(inputs: BackwardInputs) -> Made:
    """The same maths in the dtype of Q, each step rounded to it; each chunk's part is added in fp32."""
    made = _gradients(inputs, inputs.tensors.q.dtype)
    return tuple(one.to(like.dtype) for one, like in zip(made, _inputs_of(inputs), strict=True))


class Mass(NamedTuple):
    """Bounds of all P and of T = P (|dP| + |delta|), which bounds the gradients of scores: the largest sum of P over a
    column (the queries of all heads that see a key), of T over a row and over a column, the largest T, and the largest sum over
    a head's rows of a sink's, or the 2-norm of its products P dO O where that is more. ``rounded_lse``: what the largest
    log-sum-exp errs by, rounded to fp32."""

    of_p: float
    row: float
    column: float
    element: float
    sink: float
    rounded_lse: float


def masses_of(inputs: BackwardInputs) -> tuple[Mass, Mass]:
    """The Mass of a call, and that of what is lost of P and of T where numbers are too small (contract.py), in fp64."""
    call, dlse, q, dtype = _call(inputs, torch.float64), inputs.saved.dlse, inputs.tensors.q, inputs.saved.out.dtype
    unit, largest = unit_roundoff(dtype), 0.0
    least = max(_FLUSHED, unit * torch.finfo(dtype).tiny)  # what an element of O errs by that is too small
    found = q.new_zeros(4, 2, dtype=torch.float64)  # of P by columns, of T by columns, elements, rows; each whole and lost
    of_sinks = q.new_zeros(3, q.shape[1], dtype=torch.float64)  # whole, lost, and the squares of all products
    for one in sequences(call):
        masses = one.k.new_zeros(2, 2, *one.k.shape[:2])
        for chunk in chunks_of(call, one, CHUNK_SCORES, False):
            weights, norm = _weights(call, one, chunk, torch.float64)
            rows = slice(one.row + chunk.first, one.row + chunk.last)
            dout = grouped(inputs.saved.dout[one.place, :, rows].double(), one)[chunk.heads]
            values, sinks = one.v[chunk.heads, None, chunk.low : chunk.high], _of_sinks(call, one, chunk, norm)
            of_scores, out = dout @ values.mT, (weights @ values).abs()
            delta = (weights * of_scores).sum(-1, keepdim=True).abs()
            if dlse is not None:
                delta += grouped(dlse[one.place, :, rows], one)[chunk.heads, ..., None].abs()
            grouped(of_sinks[2], one)[chunk.heads] += (sinks * dout * out).square().sum((-1, -2))
            moved = (dout.abs() * (out.clamp(max=least) - unit * out).clamp(min=0.0)).sum(-1, keepdim=True)
            p = torch.stack((weights, weights.clamp(max=_FLUSHED)))
            bound, of_sink = _terms(weights, of_scores.abs() + delta, moved), _terms(sinks, delta, moved)
            masses[0, :, chunk.heads, chunk.low : chunk.high] += p.sum((2, 3))
            masses[1, :, chunk.heads, chunk.low : chunk.high] += bound.sum((2, 3))
            of_sinks[:2].unflatten(1, (one.k.shape[0], -1))[:, chunk.heads] += of_sink.sum((-1, -2))
            if bound.numel():
                largest = max(largest, norm.abs().max().item())
                found[2] = found[2].maximum(bound.flatten(1).amax(1))
                found[3] = found[3].maximum(bound.sum(-1).flatten(1).amax(1))
        if masses.numel():
            found[:2] = found[:2].maximum(masses.flatten(2).amax(2))
    of_sinks[0] = of_sinks[0].maximum(of_sinks[2].sqrt())
    of_p, column, element, row = found.tolist()
    every, lost = zip(of_p, row, column, element, of_sinks[:2].amax(1).tolist(), strict=True)
    return Mass(*every, largest * 2.0**-24), Mass(*lost, largest * 2.0**-24)


def _terms(p: torch.Tensor, size: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """P times ``size``, and the most that is lost of it where P, or the product, is flushed and delta is ``moved``, stacked."""
    whole = p * size
    return torch.stack((whole, whole.minimum(_FLUSHED * (1.0 + size)) + p * moved))


def of_rounded_out(inputs: BackwardInputs) -> tuple[float, ...]:
    """The most that each wanted gradient moves by, in fp64, where every element of O in delta moves by as much as it is."""
    call, x = _call(inputs, torch.float64), inputs.tensors
    sinks = x.q.new_zeros(x.q.shape[1], dtype=torch.float64)
    of_q = of_k = of_bias = 0.0
    for one in sequences(call):
        keys = torch.zeros_like(one.k)
        for chunk in chunks_of(call, one, CHUNK_SCORES, False):
            weights, norm = _weights(call, one, chunk, torch.float64)
            rows = slice(one.row + chunk.first, one.row + chunk.last)
            visible = (chunk.heads, None, slice(chunk.low, chunk.high))
            dout = grouped(inputs.saved.dout[one.place, :, rows].double(), one)[chunk.heads]
            delta = (dout * (weights @ one.v[visible])).abs().sum(-1, keepdim=True)  # what it moves by
            queries = grouped(one.q[:, chunk.first : chunk.last], one)[chunk.heads]
            keys[chunk.heads, chunk.low : chunk.high] += ((weights * delta).mT @ queries.abs()).sum(1)
            grouped(sinks, one)[chunk.heads] += (_of_sinks(call, one, chunk, norm) * delta).sum((-1, -2))
            if weights.numel():
                of_q = max(of_q, ((weights @ one.k[visible]).abs() * delta).max().item())
                of_bias = max(of_bias, (weights * delta).max().item())
        of_k = max(of_k, keys.max().item() if keys.numel() else 0.0)
    scale = abs(inputs.softmax_scale)
    every = (of_q * scale, of_k * scale, 0.0, sinks.max().item(), of_bias * expansion_of(x.bias))
    return tuple(one for one, wanted in zip(every, inputs.wanted, strict=True) if wanted)


def expansion_of(bias: torch.Tensor | None) -> int:
    """Over how many elements of a bias each of what is expanded to it is spread."""
    return 1 if bias is None else math.prod(size for size, stride in zip(bias.shape, bias.stride(), strict=True) if not stride)


def _inputs_of(inputs: BackwardInputs) -> list[torch.Tensor]:
    """What the wanted gradients are those of; of a bias what is expanded."""
    x = inputs.tensors
    bias = None if x.bias is None else unexpanded(x.bias)
    every = zip((x.q, x.k, x.v, x.sinks, bias), inputs.wanted, strict=True)
    return [one for one, wanted in every if one is not None and wanted]


def _call(inputs: BackwardInputs, wide: torch.dtype) -> AttentionInputs:
    """The forward's call, all that has gradients in ``wide``."""
    x = inputs.tensors
    bias = x.bias if x.bias is None or x.bias.dtype == torch.bool else x.bias.to(wide)
    tensors = x._replace(q=x.q.to(wide), k=x.k.to(wide), v=x.v.to(wide), bias=bias)
    return AttentionInputs(inputs.problem, tensors, inputs.options, inputs.softmax_scale)


def _weights(call: AttentionInputs, one: Sequence, chunk: Chunk, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities of a chunk, without a sink's, and the log-sum-exp [..., rows, 1]: 0 where nothing is seen."""
    scores = scores_of(call, one, chunk, one.k, wide, Rules())
    if call.tensors.sinks is not None:
        sinks = grouped(call.tensors.sinks, one)[chunk.heads, :, None, None].to(scores.dtype)
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    columns = chunk.high - chunk.low
    weights = torch.softmax(scores, -1)[..., :columns].masked_fill(empty, 0.0)
    if not scores.shape[-1]:
        return weights, empty * 0.0
    norm = torch.logsumexp(scores if wide == torch.float64 else scores.float(), -1, keepdim=True)
    return weights, norm.masked_fill(empty, 0.0)


@without_tf32()
def _gradients(inputs: BackwardInputs, wide: torch.dtype) -> Made:
    leaves = [one.detach().to(wide).requires_grad_() for one in _inputs_of(inputs)]
    names = [name for name, wanted in zip(Wanted._fields, inputs.wanted, strict=True) if wanted]
    of_sum = torch.float64 if wide == torch.float64 else torch.float32
    sums = [torch.zeros_like(one, dtype=of_sum) for one in leaves]
    given = {name.removeprefix("d"): leaf for name, leaf in zip(names, leaves, strict=True)}
    with torch.enable_grad():
        call = _call(inputs, wide)
        if "bias" in given and inputs.tensors.bias is not None:
            given["bias"] = given["bias"].expand(inputs.tensors.bias.shape)
        call = replace(call, tensors=call.tensors._replace(**given))
        for one in sequences(call):
            for chunk in chunks_of(call, one, CHUNK_SCORES, False):
                loss = _loss(inputs, call, one, chunk, wide)
                if loss.requires_grad:
                    parts = torch.autograd.grad(loss, leaves, allow_unused=True)
                    _add(sums, parts)
    return tuple(sums)


def _loss(inputs: BackwardInputs, call: AttentionInputs, one: Sequence, chunk: Chunk, wide: torch.dtype) -> torch.Tensor:
    """What has the gradients of a chunk: its results times the gradients into them."""
    weights, norm = _weights(call, one, chunk, wide)
    out = weights.to(wide) @ one.v[chunk.heads, None, chunk.low : chunk.high]
    rows = slice(one.row + chunk.first, one.row + chunk.last)
    dout = grouped(inputs.saved.dout[one.place, :, rows].to(wide), one)[chunk.heads]
    loss = (out * dout).sum()
    if inputs.saved.dlse is not None:
        dlse = grouped(inputs.saved.dlse[one.place, :, rows], one)[chunk.heads]
        loss = loss + (norm[..., 0] * dlse.to(norm.dtype)).sum()
    return loss


def _add(sums: Many[torch.Tensor], parts: Many[torch.Tensor | None]) -> None:
    for total, part in zip(sums, parts, strict=True):
        if part is not None:
            total += part


def _of_sinks(call: AttentionInputs, one: Sequence, chunk: Chunk, norm: torch.Tensor) -> torch.Tensor:
    """The probabilities of a chunk's sinks, [..., rows, 1], to fp64's accuracy: one less the sum of the others is not."""
    if call.tensors.sinks is None:
        return torch.zeros_like(norm)
    return (grouped(call.tensors.sinks, one)[chunk.heads, :, None, None].to(norm.dtype) - norm).exp()
