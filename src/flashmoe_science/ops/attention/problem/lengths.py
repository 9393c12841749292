"""The lengths of the sequences of one attention problem, and which query-key pairs its mask leaves, counted without a mask."""

from __future__ import annotations

from typing import NamedTuple

from flashmoe_science.ops.attention.problem.features import Features

# Fractions of the longest length, in parts of 127, so that few lengths are multiples of a tile or of a page. The steps go
# through each list in an order that mixes long and short, the longest first.
_PARTS = 127
_CACHED = tuple(range(127, 36, -6))  # 1 to 0.29: requests that are being decoded
_PACKED = (127, 104, 85, 70, 57, 47, 38, 31, 26, 21, 17, 14, 12, 9, 7, 5)  # 1 to 0.04, as many of each octave: prompts
_STEP_Q, _STEP_K, _STEP_PAD = 11, 7, 5


class SequenceLengths(NamedTuple):
    """One sequence: its queries and its keys, of which those before ``first`` are padding."""

    queries: int
    keys: int
    first: int = 0


def sequence_lengths(features: Features, batch: int, seqlen_q: int, seqlen_k: int) -> tuple[SequenceLengths, ...]:
    """The lengths of a problem's sequences, in order: a fixed pattern, the longest first.

    Ragged sequences differ in keys. Packed ones differ in queries too; each has as many keys as queries if the longest has, and
    no fewer if the longest has no fewer.
    """
    if features.lengths == "equal":
        return (SequenceLengths(seqlen_q, seqlen_k),) * batch
    made = []
    for index in range(batch):
        queries = seqlen_q
        keys = _part(_CACHED, index * _STEP_K, seqlen_k)
        if features.lengths == "packed":
            queries = _part(_PACKED, index * _STEP_Q, seqlen_q)
            keys = queries if seqlen_q == seqlen_k else keys
        if seqlen_k >= seqlen_q:
            keys = max(keys, queries)
        pad = (1 + index * _STEP_PAD) % 8 * keys // 16 if features.leftpad else 0
        made.append(SequenceLengths(queries, keys, pad))
    return tuple(made)


def _part(parts: tuple[int, ...], index: int, longest: int) -> int:
    return max(1, longest * parts[index % len(parts)] // _PARTS)


def visible_pairs(one: SequenceLengths, features: Features, causal: bool, offset: int) -> int:
    """Visible query-key pairs of a sequence and a head. ``offset``: query i stands at key i + offset."""
    after, before, seen_by_all = _ends(one, features, causal, offset)
    return _sum(one.queries, after, one) - _sum(one.queries, before, one) + one.queries * seen_by_all


def visible_keys(one: SequenceLengths, features: Features, causal: bool, offset: int) -> int:
    """Keys of a sequence that any query sees."""
    after, before, seen_by_all = _ends(one, features, causal, offset)
    return _end(one.queries - 1, after, one) - _end(0, before, one) + seen_by_all


class _End(NamedTuple):
    """Query i's first unseen (or first seen) key is ``i + shift``, within ``low`` and the number of keys; all have the same,
    ``low``, where ``shift`` is None."""

    shift: int | None
    low: int


def _ends(one: SequenceLengths, features: Features, causal: bool, offset: int) -> tuple[_End, _End, int]:
    """The end and the start of the keys behind the prefix that a query sees, and how many keys the prefix shows to all."""
    right = 0 if causal else features.window_right
    first = min(one.first, one.keys)
    low = max(first, min(features.prefix, one.keys))
    after = _End(None, one.keys) if right is None else _End(offset + right + 1, low)
    before = _End(None, low) if features.window_left is None else _End(offset - features.window_left, low)
    return after, before, low - first


def _end(row: int, end: _End, one: SequenceLengths) -> int:
    return end.low if end.shift is None else min(one.keys, max(end.low, row + end.shift))


def _sum(rows: int, end: _End, one: SequenceLengths) -> int:
    """The sum of ``_end`` over rows 0 to ``rows`` - 1."""
    if end.shift is None:
        return rows * end.low
    flat = min(rows, max(0, end.low - end.shift))  # rows at ``low``
    full = min(rows, max(0, one.keys - end.shift))  # from this row on all are at ``keys``
    full = max(full, flat)
    between = (flat + full - 1 + 2 * end.shift) * (full - flat) // 2
    return flat * end.low + between + (rows - full) * one.keys
