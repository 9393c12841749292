"""Masks in Triton: which keys a query sees, and which tiles have such pairs.

Query i of a sequence sees keys from ``i + diagonal - left`` to before ``i + right_end``, and those before ``prefix``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashmoe_science.ops.attention.problem import AttentionProblem

FAR = 2**30  # a window that hides nothing; positions plus this still fit 32 bits


class Band(NamedTuple):
    """The mask of a sequence of that many queries and keys; ``diagonal``: keys less queries."""

    seqlen_q: tl.tensor
    seqlen_k: tl.tensor
    diagonal: tl.tensor
    left: tl.tensor
    right_end: tl.tensor
    prefix: tl.tensor


class Tiles(NamedTuple):
    """Rows from ``start`` to before ``end``, the tiles of which between ``whole`` and ``beyond`` need no mask. All but ``end``
    are multiples of a tile, and none is below the one before."""

    start: tl.tensor
    whole: tl.tensor
    beyond: tl.tensor
    end: tl.tensor


@triton.jit
def in_band(query, key, end, diagonal, left, right_end, prefix, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr):
    """Whether queries see keys, of which there are ``end``."""
    near = key < end
    if RIGHT:
        near = near & (key < query + right_end)
    if LEFT:
        near = near & (key >= query + diagonal - left)
    if PREFIX:
        near = near | (key < prefix)
    return near


@triton.jit
def band_of(batch, seqlen_q, seqlen_k, left, right, prefixes, TOPLEFT: tl.constexpr):
    """The Band of a sequence."""
    diagonal = seqlen_k - seqlen_q
    right_end = right + 1 if TOPLEFT else diagonal + right + 1
    prefix = 0
    if prefixes is not None:
        prefix = tl.minimum(tl.load(prefixes + batch), seqlen_k)
    return Band(seqlen_q, seqlen_k, diagonal, left, right_end, prefix)


@triton.jit
def _tiles(start, all_start, all_end, end, BLOCK: tl.constexpr):
    """The Tiles of rows [start, end), of which those in [all_start, all_end) are on the one side of every row of the other."""
    end = tl.maximum(end, start)
    last = tl.cdiv(end, BLOCK) * BLOCK
    start = start // BLOCK * BLOCK
    whole = tl.minimum(tl.maximum(tl.cdiv(all_start, BLOCK) * BLOCK, start), last)
    beyond = tl.maximum(tl.minimum(tl.maximum(all_end, 0) // BLOCK * BLOCK, last), whole)
    return Tiles(start, whole, beyond, end)


@triton.jit
def tiles_of_keys(first, last, band, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr):
    """The Tiles of keys that queries ``first`` to ``last`` see."""
    start, all_start, all_end, end = 0, 0, band.seqlen_k, band.seqlen_k
    if RIGHT:
        end = tl.maximum(tl.minimum(end, last + band.right_end), band.prefix)
        all_end = tl.maximum(tl.minimum(all_end, first + band.right_end), band.prefix)
    if LEFT:
        all_start = tl.maximum(last + band.diagonal - band.left, 0)
        if not PREFIX:
            start = tl.maximum(first + band.diagonal - band.left, 0)
    return _tiles(start, all_start, all_end, end, BLOCK)


@triton.jit
def tiles_of_queries(first, last, band, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr):
    """The Tiles of queries that see keys ``first`` to ``last``."""
    start, all_start, all_end, end = 0, 0, band.seqlen_q, band.seqlen_q
    if RIGHT:
        start = tl.maximum(first + 1 - band.right_end, 0)
        all_start = tl.maximum(last + 1 - band.right_end, 0)
    if LEFT:
        end = tl.minimum(end, last - band.diagonal + band.left + 1)
        all_end = tl.minimum(all_end, first - band.diagonal + band.left + 1)
    if PREFIX:  # every query sees these keys, or some of them
        start = tl.where(first < band.prefix, 0, start)
        end = tl.where(first < band.prefix, band.seqlen_q, end)
        all_start = tl.where(first < band.prefix, tl.where(last < band.prefix, 0, band.seqlen_q), all_start)
        all_end = tl.where(first < band.prefix, band.seqlen_q, all_end)
    return _tiles(start, all_start, all_end, end, BLOCK)


def window_of(problem: AttentionProblem, seqlen_q: int) -> tuple[int, int | None]:
    """The keys before and after its diagonal that a query sees; None for no limit on its right, as that of one query that sees
    the last key."""
    left, right = problem.features.window_left, 0 if problem.causal else problem.features.window_right
    if seqlen_q == 1 and problem.mask != "causal-topleft":
        right = None
    return FAR if left is None else min(left, FAR), None if right is None else min(right, FAR)
