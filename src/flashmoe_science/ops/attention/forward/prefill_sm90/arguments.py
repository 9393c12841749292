"""What the partitions of fwd_gluon_sm90 are given, by name."""

from __future__ import annotations

from typing import Any, NamedTuple


class Traits(NamedTuple):
    """What a build is specialised on, all of it constants."""

    CONSUMERS: Any
    CAUSAL: Any
    ALIGNED: Any  # the diagonal of a consumer's rows is in one tile of keys
    EVEN_K: Any  # tiles of keys divide the keys
    WRITE_LSE: Any
    OWN_OUT: Any  # O has shared memory of its own, and not Q's
    SCHEDULE: Any
    UNIT: Any  # elements of a bias that are read at once
    PAGE: Any  # rows of a page; 0 without pages
    SINKS: Any


class Sizes(NamedTuple):
    """The kernel's last integers."""

    heads: Any
    group: Any
    seqlen_q: Any
    seqlen_k: Any
    causal_offset: Any
    tiles_m: Any
    heads_all: Any
    pair_rounds: Any


class Pages(NamedTuple):
    """A page table: its entries from sequence to sequence, and rows from page to page of K and of V."""

    table: Any
    stride: Any
    pitch_k: Any
    pitch_v: Any


class Work(NamedTuple):
    """What the tile scheduler and the loads depend on."""

    sizes: Any
    tiles: Any  # the list of tiles of packed sequences (packed_schedule.py), or None
    mailbox: Any  # with such a list: what the producer takes of it for the consumers
    prefix: Any  # of each sequence, how many keys all queries see; or None
    left: Any  # keys of a window before a query's own place; or None
    pages: Any


class Sequence(NamedTuple):
    """One of packed sequences."""

    batch: Any
    end_q: Any  # where its queries end among all of them; with sinks below 0 of the rest, which no sequence has
    seqlen_q: Any
    seqlen_k: Any


class Output(NamedTuple):
    """Where results go, and what scores and values are given to make them."""

    descs: Any  # of O, a tuple of parts
    lse: Any  # or None
    scales: Any
    v_low: Any  # in the wide form (wide.py), or None
    sinks: Any  # or None
    bias: Any
