"""What common mistakes in attention compute, in fp64: a wrong result that matches one is named by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log
from typing import NamedTuple

import torch

from flashmoe_science.contract import Mistake
from flashmoe_science.ops.attention.call.kernel import AttentionInputs
from flashmoe_science.ops.attention.problem.features import PLAIN
from flashmoe_science.ops.attention.proof.oracle import CHUNK_SCORES, Rules, attention_oracle


class Wrong(NamedTuple):
    """A mistake's code, its words after "it is right", and what is computed by it: other inputs, or by other rules."""

    code: str
    words: str
    inputs: AttentionInputs
    rules: Rules = Rules()


def mistakes(inputs: AttentionInputs) -> Iterator[Mistake]:
    """The results of other masks, features, softmax scales and shared heads, each only where it is another than the right one;
    the likeliest first."""
    of_features = (_windows, _alignment, _scores, _sinks, _biases, _caches, _cache_scales)
    for some in (*((_masks,) if inputs.problem.features == PLAIN else of_features), _scales, _heads):
        for one in some(inputs):
            yield Mistake(one.code, f"it is right {one.words}", attention_oracle(one.inputs, one.rules))
    yield from _rows(inputs)


def _with(inputs: AttentionInputs, **features: object) -> AttentionInputs:
    problem = inputs.problem
    return replace(inputs, problem=replace(problem, features=replace(problem.features, **features)))  # type: ignore[arg-type]


def _given(inputs: AttentionInputs, **changed: torch.Tensor | None) -> AttentionInputs:
    return replace(inputs, tensors=inputs.tensors._replace(**changed))  # type: ignore[arg-type]  # none of them is q, k or v


def _alignment(inputs: AttentionInputs) -> Iterator[Wrong]:
    problem, features = inputs.problem, inputs.problem.features
    unequal = any(one.queries != one.keys for one in problem.sequence_lengths())
    if unequal and problem.mask != "causal-topleft" and (problem.causal or features.window or features.bias == "alibi"):
        yield Wrong("mask-top-left", "where query i stands at key i (aligned top-left)", inputs, Rules(top_left=True))
    if problem.causal:
        unmasked = replace(problem, mask="full", features=replace(features, prefix=0))  # a prefix is of a causal mask
        yield Wrong("mask-missing", "for no mask", replace(inputs, problem=unmasked))


def _windows(inputs: AttentionInputs) -> Iterator[Wrong]:
    features = inputs.problem.features
    for side in ("left", "right"):
        limit = getattr(features, f"window_{side}")
        if limit is not None:
            more = _with(inputs, **{f"window_{side}": limit + 1})
            yield Wrong(f"window-{side}-more", f"for a window of one key more on its {side}", more)
            if limit > 0:
                fewer = _with(inputs, **{f"window_{side}": limit - 1})
                yield Wrong(f"window-{side}-fewer", f"for a window of one key fewer on its {side}", fewer)
    if features.window:
        yield Wrong("window-missing", "for no window", _with(inputs, window_left=None, window_right=None))
    if features.prefix:
        yield Wrong("prefix-missing", "for no prefix", _with(inputs, prefix=0))


def _scores(inputs: AttentionInputs) -> Iterator[Wrong]:
    if inputs.problem.features.softcap:
        yield Wrong("softcap-missing", "for no soft cap", _with(inputs, softcap=0))
        words = "where the soft cap comes after the mask, and hidden keys count"
        yield Wrong("softcap-after-mask", words, inputs, Rules(cap_after_mask=True))


def _sinks(inputs: AttentionInputs) -> Iterator[Wrong]:
    if inputs.problem.features.sinks:
        assert inputs.tensors.sinks is not None
        yield Wrong("sinks-missing", "for no sinks", _with(inputs, sinks=False))
        yield Wrong("sinks-twice", "where each sink counts twice", _given(inputs, sinks=inputs.tensors.sinks + log(2.0)))


def _biases(inputs: AttentionInputs) -> Iterator[Wrong]:
    kind, tensors = inputs.problem.features.bias, inputs.tensors
    if kind == "none":
        return
    name = {"alibi": "ALiBi", "boolean": "boolean mask", "additive": "bias"}[kind]
    yield Wrong("bias-missing", f"for no {name}", _with(inputs, bias="none"))
    if kind == "boolean":
        assert tensors.bias is not None
        yield Wrong("mask-inverted", "where the boolean mask hides what is True", _given(inputs, bias=~tensors.bias))
    if kind == "alibi":
        assert tensors.alibi_slopes is not None
        yield Wrong("alibi-sign", "where ALiBi favours keys far away", _given(inputs, alibi_slopes=-tensors.alibi_slopes))


def _caches(inputs: AttentionInputs) -> Iterator[Wrong]:
    tensors = inputs.tensors
    if tensors.cache_seqlens is not None:
        shorter = (tensors.cache_seqlens - 1).clamp(min=0)
        yield Wrong("last-key-missing", "for caches without their last key", _given(inputs, cache_seqlens=shorter))
    if tensors.page_table is not None:
        in_order = _given(inputs, page_table=_pages_in_order(inputs))
        yield Wrong("pages-in-order", "where pages are read one after another and not as the table says", in_order)
    if tensors.cache_batch_idx is not None:
        yield Wrong("cache-rows", "where sequence i reads row i of the cache", _given(inputs, cache_batch_idx=None))
    if tensors.leftpad is not None:
        yield Wrong("leftpad-missing", "for no left padding", _given(inputs, leftpad=None))


def _pages_in_order(inputs: AttentionInputs) -> torch.Tensor:
    """A table by which each sequence's pages follow those of the one before."""
    tensors, page = inputs.tensors, inputs.k.shape[2]
    assert tensors.page_table is not None
    assert tensors.cache_seqlens is not None
    counts = (tensors.cache_seqlens.long() + page - 1) // page
    starts = counts.cumsum(0) - counts
    columns = torch.arange(tensors.page_table.shape[1], device=counts.device)
    return ((starts[:, None] + columns[None, :]) % inputs.k.shape[0]).to(torch.int32)


def _cache_scales(inputs: AttentionInputs) -> Iterator[Wrong]:
    tensors = inputs.tensors
    for tensor, scale in (("key", tensors.k_scale), ("value", tensors.v_scale)):
        if scale is not None:
            other = _given(inputs, **{f"{tensor[0]}_scale": torch.ones_like(scale)})
            yield Wrong(f"{tensor}-scale-missing", f"where the {tensor}s are not multiplied by their scale", other)


def _masks(inputs: AttentionInputs) -> Iterator[Wrong]:
    problem = inputs.problem
    if problem.causal:
        if problem.seqlen_q != problem.seqlen_k:
            top, bottom = ("bottom-right", "causal") if problem.mask == "causal-topleft" else ("top-left", "causal-topleft")
            other = replace(problem, mask=bottom)  # type: ignore[arg-type]  # one of the two, as is checked
            yield Wrong(f"mask-{top}", f"for a causal mask aligned {top}", replace(inputs, problem=other))
        yield Wrong("mask-missing", "for no mask", replace(inputs, problem=replace(problem, mask="full")))
    else:
        yield Wrong("mask-not-asked", "for a causal mask", replace(inputs, problem=replace(problem, mask="causal")))


def _scales(inputs: AttentionInputs) -> Iterator[Wrong]:
    usual = inputs.problem.softmax_scale
    if inputs.softmax_scale != usual:
        yield Wrong("scale-default", "for the default softmax scale", replace(inputs, softmax_scale=usual))
    if inputs.softmax_scale != 1.0:
        yield Wrong("scale-missing", "for a softmax scale of 1", replace(inputs, softmax_scale=1.0))
    if inputs.softmax_scale < 0.0:
        positive = replace(inputs, softmax_scale=-inputs.softmax_scale)
        yield Wrong("scale-sign", "for the softmax scale without its sign", positive)


def _heads(inputs: AttentionInputs) -> Iterator[Wrong]:
    heads, heads_kv = inputs.problem.heads, inputs.problem.heads_kv
    if not 1 < heads_kv < heads:
        return
    index = torch.arange(heads, device=inputs.q.device)
    for code, words, of_kv in (
        ("heads-interleaved", "where query head h reads key/value head h % heads_kv", index % heads_kv),
        ("heads-first", "where every query head reads the first key/value head", index * 0),
        ("heads-clamped", "where query head h reads key/value head h, or the last", index.clamp(max=heads_kv - 1)),
    ):
        shared = replace(inputs.problem, heads_kv=heads)
        tensors = inputs.tensors._replace(k=inputs.k[:, of_kv], v=inputs.v[:, of_kv])
        if tensors.k_scale is not None and tensors.v_scale is not None:
            tensors = tensors._replace(k_scale=tensors.k_scale[:, of_kv], v_scale=tensors.v_scale[:, of_kv])
        yield Wrong(code, words, replace(inputs, problem=shared, tensors=tensors))


def _rows(inputs: AttentionInputs) -> Iterator[Mistake]:
    """Rows that see no key, and the division that a softmax ends with."""
    out, lse = attention_oracle(inputs)
    empty = (lse == -torch.inf)[..., None]
    if bool(empty.any()):
        nan = torch.where(empty, torch.nan, out)
        yield Mistake("empty-rows", "it is right but for queries that see no key, which must be zeros and are NaN", (nan, lse))
        if inputs.problem.features != PLAIN:
            return
        group = inputs.problem.heads // inputs.problem.heads_kv
        mean = torch.where(empty, inputs.v.mean(-2, keepdim=True).repeat_interleave(group, 1), out)
        words = "it is right but for queries that see no key, which must be zeros and are the mean of all values"
        yield Mistake("empty-rows", words, (mean, lse))
    elif inputs.problem.features == PLAIN and not inputs.problem.causal and inputs.problem.scores() <= CHUNK_SCORES:
        keys = inputs.k.repeat_interleave(inputs.problem.heads // inputs.problem.heads_kv, 1)
        largest = (inputs.q @ keys.transpose(-1, -2) * inputs.softmax_scale).amax(-1)
        wrong = out * torch.exp(lse - largest)[..., None]
        yield Mistake("not-normalised", "it is right but for the division by the sum of the exponentials", (wrong, lse))
