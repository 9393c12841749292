"""Refuses lengths, pages and rotary positions by their values, which other checks never read: they may be on a GPU.

A refusal is one line: the argument, what it was and for which sequence, what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flashmoe_science.ops.attention.call.append import Append
from flashmoe_science.ops.attention.call.tensors import DEFAULT_NAMES, ArgNames, Options, Tensors

_Counts = NDArray[np.int64]


class Lengths(NamedTuple):
    """The int32 tensors that say where a call's sequences are, None where absent, and the sizes that bound their values.

    cu_seqlens_q, cu_seqlens_k, cu_seqlens_new: [batch + 1], of ``tokens_q``, ``tokens_k`` and ``new`` packed tokens.
    cache_seqlens: [batch]; without ``cu_seqlens_k`` at most ``capacity``, new keys included.
    page_table: [batch, most pages], of ``caches`` pages of ``page`` rows. cache_batch_idx: [batch], of ``caches`` rows.
    rotary_seqlens: [batch], in place of ``cache_seqlens``; ``positions`` of the rotary tables, 0 without.
    longest_q, longest_k: no sequence is longer; None where unknown.
    new: new keys of each sequence, or of all packed ones. queries: of each sequence, if not packed; ``one_position`` rotates
        all of them by the first position.
    """

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    cache_seqlens: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    cu_seqlens_new: torch.Tensor | None = None
    rotary_seqlens: torch.Tensor | None = None
    tokens_q: int = 0
    tokens_k: int = 0
    longest_q: int | None = None
    longest_k: int | None = None
    capacity: int = 0
    page: int = 0
    caches: int = 0
    positions: int = 0
    new: int = 0
    queries: int = 0
    one_position: bool = False
    names: ArgNames = DEFAULT_NAMES

    def given(self) -> list[torch.Tensor]:
        return [one for one in self[:8] if isinstance(one, torch.Tensor)]

    def of(self, *tensors: torch.Tensor | None) -> Lengths:
        """The same sizes with these tensors, None for the others."""
        return self._replace(**dict(zip_longest(self._fields[:8], tensors)))  # type: ignore[arg-type]

    def on_cpu(self) -> Lengths:
        return self.of(*(one.cpu() if isinstance(one, torch.Tensor) else None for one in self[:8]))


def lengths_of(tensors: Tensors, options: Options) -> Lengths:
    """The Lengths of a call without anything to append."""
    k, table = tensors.k, tensors.page_table
    page = 0 if table is None else k.shape[2]
    return Lengths(
        *tensors[3:9], tokens_q=tensors.q.shape[2], tokens_k=k.shape[2], longest_q=options.max_seqlen_q,
        longest_k=options.max_seqlen_k or None, capacity=k.shape[2] if table is None else table.shape[1] * page, page=page,
        caches=k.shape[0], names=options.names,
    )  # fmt: skip


def lengths_of_append(a: Append) -> Lengths:
    """The Lengths of an append."""
    rows, table = a.k_cache.shape[2], a.page_table
    return Lengths(
        a.cu_seqlens_q, None, a.cache_seqlens, table, a.cache_batch_idx, None, a.cu_seqlens_k_new, a.rotary_seqlens,
        tokens_q=a.q.shape[2], longest_q=a.max_seqlen_q, capacity=rows if table is None else table.shape[1] * rows,
        page=a.page, caches=a.k_cache.shape[0], positions=0 if a.rotary_cos is None else a.rotary_cos.shape[0],
        new=a.k.shape[2], queries=a.q.shape[2], one_position=a.one_position, names=ArgNames(page_table=a.table_name),
    )  # fmt: skip


def check_lengths(one: Lengths) -> None:
    """Raise ValueError unless all sequences are in bounds. The tensors are on the CPU."""
    names = one.names
    queries = _counts(one.cu_seqlens_q, names.cu_seqlens_q, one.tokens_q, "queries", one.longest_q, "max_seqlen_q")
    keys = _counts(one.cu_seqlens_k, names.cu_seqlens_k, one.tokens_k, "keys", one.longest_k, "max_seqlen_k")
    new = _counts(one.cu_seqlens_new, "cu_seqlens_k_new", one.new, "new keys", None, "")
    if one.cache_batch_idx is not None:
        _check_range(_numbers(one.cache_batch_idx), names.cache_batch_idx, one.caches - 1, "the last there is")
    if one.leftpad is not None:
        _check_range(_numbers(one.leftpad), names.leftpad, one.capacity, "the capacity")
    if one.cache_seqlens is not None:
        _check_cached(one, _numbers(one.cache_seqlens), queries, keys, new)


def _check_cached(one: Lengths, used: _Counts, queries: _Counts | None, keys: _Counts | None, new: _Counts | None) -> None:
    """Raise unless ``used`` and new keys are in bounds, and so are their pages and positions."""
    name, capacity = one.names.cache_seqlens, one.capacity
    if keys is not None:
        most, what = keys, f"what {one.names.cu_seqlens_k} gives it"
    elif one.longest_k is None or one.longest_k >= capacity:
        most, what = np.full_like(used, capacity), "the capacity"
    else:
        most, what = np.full_like(used, one.longest_k), "max_seqlen_k"
    _check_range(used, name, most, what)
    added = np.full_like(used, one.new) if new is None else new
    _refuse(used + added > most, lambda n: (
        f"{name} is {used[n]} for sequence {n}, which gets {added[n]} new keys; together they must be at most {most[n]}, {what}"
    ))  # fmt: skip
    if one.page_table is not None:
        _check_pages(_numbers(one.page_table), -(-(used + added) // one.page), one.caches, one.names.page_table)
    if one.positions:
        turned = np.full_like(used, one.queries) if queries is None else queries
        _check_positions(one, used, np.maximum(added, np.minimum(turned, 1) if one.one_position else turned))


def _check_positions(one: Lengths, first: _Counts, turned: _Counts) -> None:
    if one.rotary_seqlens is not None:
        first = _numbers(one.rotary_seqlens)
        _check_range(first, "rotary_seqlens", one.positions, "the positions of rotary_cos")
    _refuse(first + turned > one.positions, lambda n: (
        f"rotary_cos has {one.positions} positions and sequence {n} needs {first[n] + turned[n]}; it must have at least as many"
    ))  # fmt: skip


def _counts(starts: torch.Tensor | None, name: str, total: int, what: str, longest: int | None, bound: str) -> _Counts | None:
    """How many tokens each sequence has; None without ``starts``, which must rise from 0 to at most ``total``."""
    if starts is None:
        return None
    at = _numbers(starts)
    if at[0] != 0:
        raise ValueError(f"{name} begins at {at[0]}; it must begin at 0")
    counts: _Counts = np.diff(at)
    _refuse(counts < 0, lambda n: f"{name} falls from {at[n]} to {at[n + 1]} at sequence {n}; it must not fall")
    if at[-1] > total:
        raise ValueError(f"{name} ends at {at[-1]} and there are {total} {what}; it must end there or before")
    if longest is not None:
        _refuse(counts > longest, lambda n: (
            f"{bound} is {longest} and sequence {n} has {counts[n]} {what}; it must be at least as many"
        ))  # fmt: skip
    return counts


def _check_range(values: _Counts, name: str, most: int | _Counts, what: str) -> None:
    limits = np.broadcast_to(most, values.shape)
    _refuse((values < 0) | (values > limits), lambda n: (
        f"{name} is {values[n]} for sequence {n}; it must be from 0 to {limits[n]}, {what}"
    ))  # fmt: skip


def _check_pages(table: _Counts, used: _Counts, pages: int, name: str) -> None:
    bad = ((table < 0) | (table >= pages)) & (np.arange(table.shape[1]) < used[:, None])
    _refuse(np.any(bad, axis=1), lambda n: (
        f"{name} is {table[n, bad[n].argmax()]} for sequence {n} at {bad[n].argmax()}, where it has keys; it must be from 0 to "
        f"{pages - 1}"
    ))  # fmt: skip


def _refuse(bad: NDArray[np.bool_], words: Callable[[int], str]) -> None:
    """Raise ValueError with the words of the first bad sequence, if there is one."""
    if bad.any():
        raise ValueError(words(int(bad.argmax())))


def _numbers(tensor: torch.Tensor) -> _Counts:
    return tensor.numpy().astype(np.int64)
