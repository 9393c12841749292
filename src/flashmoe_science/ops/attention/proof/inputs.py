"""Tensors of one call of an attention problem with features: ragged caches, shuffled pages, packed sequences, biases.

All of them are inputs by name, so that whoever examines a kernel can guard, change and hand over each. Lengths are those of
``AttentionProblem.sequence_lengths``. What a call must not use is there to be read by mistake: a cache has more pages than its
sequences need, rows past a length hold large numbers (NaN, once ``fill_unused`` says so), and page numbers past it are of no
page. The longest sequence fills its cache, as a call in FlashAttention's names knows no other bound on the lengths; not so if
``sliced``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate

import torch

from flashmoe_science.ops.attention.call.tensors import Options, Tensors, options_of
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.lengths import SequenceLengths

Made = dict[str, torch.Tensor]

FP8 = torch.float8_e4m3fn
SPARE_ROWS, SPARE_PAGES, SPARE_COLUMNS = 24, 3, 2  # of a contiguous cache, of a paged one, of its table
GARBAGE = 240.0  # in rows that no call may use: e4m3 holds it, and a kernel that takes one for a key is far off
_NO_PAGES = (2**30, -1)  # in entries of a table past a sequence's length
_FP8_SPREAD = 4.0  # of e4m3 keys and values before their scale
_VISIBLE = 0.75  # of a boolean mask


def make_tensors(
    problem: AttentionProblem, dtype: torch.dtype, device: torch.device, generator: torch.Generator, sliced: bool
) -> Made:
    """Q, K, V and the tensors that the problem's features bring, in this order. ``sliced``: Q, K and V are the first columns,
    rows and heads of tensors with twice as many, a mask the first columns of one; a cache has room for longer sequences, and
    the rows of a contiguous one are found by an index."""
    features, lengths = problem.features, problem.sequence_lengths()
    tables = _tables(problem, lengths, device, generator, sliced)
    queries = (problem.batch, problem.heads, problem.seqlen_q)
    if features.lengths == "packed":
        queries = (1, problem.heads, sum(one.queries for one in lengths))
    of_cache = _cache_shape(problem, lengths, sliced)
    made: Made = {}
    for name, shape, width in (
        ("q", queries, problem.head_dim),
        ("k", of_cache, problem.head_dim),
        ("v", of_cache, problem.head_dim_v),
    ):
        made[name] = normal((*shape, width), problem.layout == "bshd", dtype, device, generator, sliced)
        if features.fp8_cache and name != "q":
            made[name] = made[name].mul_(_FP8_SPREAD).to(FP8)
    made |= tables | _biases(problem, dtype, device, generator)
    if sliced and "bias" in made:
        made["bias"] = torch.cat((made["bias"], made["bias"].flip(-1)), dim=-1)[..., : problem.seqlen_k]
    fill_unused(made, GARBAGE)
    return made


def normal(
    shape: tuple[int, ...], rows_first: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator, sliced: bool
) -> torch.Tensor:
    """Standard normal numbers, a [batch, heads, rows, width] view, rows before heads in memory where ``rows_first``."""
    batch, heads, rows, width = shape
    first = (rows, heads) if rows_first else (heads, rows)
    flat = torch.empty((batch, *first, width), dtype=dtype, device=device).normal_(generator=generator)
    if sliced:
        flat = flat.repeat(1, 2, 2, 2)[:, : first[0], : first[1], :width]
    return flat.transpose(1, 2) if rows_first else flat


def _cache_shape(problem: AttentionProblem, lengths: tuple[SequenceLengths, ...], sliced: bool) -> tuple[int, int, int]:
    """Shape of K and V but for their width."""
    features = problem.features
    if features.page:
        return (_pages(lengths, features.page) + SPARE_PAGES, problem.heads_kv, features.page)
    if features.lengths == "packed":
        return (1, problem.heads_kv, sum(one.keys for one in lengths))
    if features.lengths == "ragged":
        return (problem.batch + sliced, problem.heads_kv, problem.seqlen_k + SPARE_ROWS * sliced)
    return (problem.batch, problem.heads_kv, problem.seqlen_k)


def _pages(lengths: tuple[SequenceLengths, ...], page: int) -> int:
    return sum(-(-one.keys // page) for one in lengths)


def _tables(
    problem: AttentionProblem,
    lengths: tuple[SequenceLengths, ...],
    device: torch.device,
    generator: torch.Generator,
    sliced: bool,
) -> Made:
    """Integers that locate each sequence."""
    features = problem.features

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    made: Made = {}
    if features.lengths == "packed":
        made["cu_seqlens_q"] = integers([0, *accumulate(one.queries for one in lengths)])
        if not features.page:
            made["cu_seqlens_k"] = integers([0, *accumulate(one.keys for one in lengths)])
    if features.lengths == "ragged" or features.page:
        made["cache_seqlens"] = integers([one.keys for one in lengths])
    if features.page:
        made["page_table"] = _page_table(lengths, features.page, SPARE_COLUMNS * sliced, device, generator)
    elif features.lengths == "ragged" and sliced:
        rows = torch.randperm(problem.batch + 1, generator=generator, device=device)
        made["cache_batch_idx"] = rows[: problem.batch].to(torch.int32)
    if features.leftpad:
        made["leftpad"] = integers([one.first for one in lengths])
    if features.prefix:
        made["prefix"] = integers([features.prefix] * problem.batch)
    return made


def _page_table(
    lengths: tuple[SequenceLengths, ...], page: int, spare: int, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    columns = -(-max(one.keys for one in lengths) // page) + spare
    table = torch.empty((len(lengths), columns), dtype=torch.int32, device=device)
    for parity, number in enumerate(_NO_PAGES):
        table[:, parity::2] = number
    shuffled = torch.randperm(_pages(lengths, page) + SPARE_PAGES, generator=generator, device=device).to(torch.int32)
    first = 0
    for row, one in enumerate(lengths):
        last = first + -(-one.keys // page)
        table[row, : last - first] = shuffled[first:last]
        first = last
    return table


def _biases(problem: AttentionProblem, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Made:
    """Tensors that change scores: a logit for each head, slopes, a bias, the scales of e4m3 keys and values."""
    features, heads = problem.features, problem.heads

    def uniform(shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        return torch.empty(shape, device=device).uniform_(low, high, generator=generator)

    made: Made = {}
    if features.sinks:
        # One weighs as much as a quarter of the keys: of many keys another would be lost in rounding.
        usual_sink = math.log(max(1, problem.seqlen_k) / 4)
        made["sinks"] = torch.empty(heads, dtype=dtype, device=device).normal_(generator=generator) + usual_sink
    if features.bias == "alibi":
        usual = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)
        made["alibi_slopes"] = usual * uniform((heads,), 0.5, 1.5)
    elif features.bias == "boolean":
        made["bias"] = uniform((problem.batch, 1, problem.seqlen_q, problem.seqlen_k), 0.0, 1.0) < _VISIBLE
        made["bias"][..., 0] = True  # no row is hidden by this mask alone
    elif features.bias == "additive":
        shape = (1, heads, problem.seqlen_q, problem.seqlen_k)
        made["bias"] = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
    if features.fp8_cache:
        made |= {name: uniform((problem.batch, problem.heads_kv), 0.15, 0.35) for name in ("k_scale", "v_scale")}
    return made


def call_of(problem: AttentionProblem, made: Mapping[str, torch.Tensor]) -> tuple[Tensors, Options]:
    """The tensors and options of a call that asks for every output."""
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    given = dict(made)
    if "alibi_slopes" in made:
        given["alibi_slopes"] = made["alibi_slopes"].expand(shape[:2])
    if "bias" in made:
        given["bias"] = made["bias"].expand(shape)
    return Tensors(**given), options_of(problem)


def fill_unused(tensors: Made, value: float, leftpad: bool = False) -> None:
    """Write ``value`` to the rows of a cache that no call may use; to those before the first valid key where ``leftpad``."""
    if "cache_seqlens" not in tensors or tensors["k"].is_meta:
        return
    lengths, keys = tensors["cache_seqlens"], tensors["k"]
    first = tensors.get("leftpad") if leftpad else None
    used = torch.zeros((keys.shape[0], keys.shape[2]), dtype=torch.bool, device=keys.device)
    table = tensors.get("page_table")
    columns = 1 if table is None else table.shape[1]
    place = torch.arange(columns * keys.shape[2], device=keys.device)
    valid = place[None, :] < lengths[:, None]
    if first is not None:
        valid &= place[None, :] >= first[:, None]
    if table is None:
        index = tensors.get("cache_batch_idx")
        used[slice(0, len(lengths)) if index is None else index.long()] = valid
    else:
        valid = valid.unflatten(1, (columns, keys.shape[2]))
        real = torch.arange(columns, device=keys.device)[None, :] * keys.shape[2] < lengths[:, None]
        used[table[real].long()] = valid[real]
    for name in ("k", "v"):
        tensor = tensors[name]
        bits = torch.tensor(value).to(tensor.dtype)
        if tensor.dtype == FP8:  # as bytes: few operators know it
            tensor, bits = tensor.view(torch.uint8), bits.view(torch.uint8)
        tensor.masked_fill_(~used[:, None, :, None], bits.item())
