"""What the partitions of chunk_gluon_sm90 are given, by name."""

from __future__ import annotations

from typing import Any, NamedTuple


class Traits(NamedTuple):
    """What a build is specialised on, all of it constants."""

    CONSUMERS: Any
    QUERIES: Any  # of a consumer
    GROUP: Any
    DV: Any
    PEELED: Any  # tiles of keys before the loop, which the diagonal may cross
    CAUSAL: Any
    SPLIT: Any
    ZEROED: Any  # rows of V past the last key may be anything
    COMPENSATED: Any
    PAGE: Any  # rows of a page; 0 without pages


class KeyTiles(NamedTuple):
    """The tiles of keys of a program, [low, high), and how many steps it takes: more than tiles where an unrolled few are
    padded."""

    low: Any
    high: Any
    count: Any


class CacheRows(NamedTuple):
    """Where a sequence's keys are without pages: the row of the cache, and the first of its rows."""

    batch: Any
    first: Any


class CachePages(NamedTuple):
    """Where a sequence's keys are in pages: its row of the page table, and how many pages it has."""

    table: Any
    count: Any


class Loads(NamedTuple):
    """What the producer copies."""

    batch_q: Any
    head_kv: Any
    first_head: Any
    first_row: Any  # among all of packed queries
    keys: Any
    tiles: Any


class Rows(NamedTuple):
    """A program's tile of queries, and which keys they see."""

    tiles: Any
    first_head: Any  # of those of a key head
    first_row: Any  # of the sequence's queries
    seqlen_q: Any
    seqlen_k: Any
    diagonal: Any  # from a query to the last key that it sees, where keys end
    left: Any  # a window's keys before a query's own place, or None
    right: Any  # and after it, or None


class Output(NamedTuple):
    """Where results go: pointers, and offsets of the program's first row."""

    out: Any
    lse: Any  # or None
    partials: Any  # where keys are split, else None
    sinks: Any  # or None
    out_at: Any
    lse_at: Any
    part_at: Any
    sums_at: Any
    stride_oh: Any
    stride_om: Any
    stride_lse: Any
    splits: Any
