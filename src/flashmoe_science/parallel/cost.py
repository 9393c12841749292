"""What an exchange between ranks costs: bytes that a rank receives, and the time that they take between GPUs of one host.

Times are predicted from two H100 and two H200 (docs/notes/two-gpus.md), and are unknown for other GPUs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flashmoe_science.parallel.exchange import joined
from flashmoe_science.parallel.layout import Cut

FLOPS = 640e12  # a second, of attention in 16 bits with heads of 128, by an H100 or an H200
MERGE = 18 / 3.0e12  # seconds of merging an element of a result: bytes by a rate, which no record tells
MISFIT = {"keys": 0.08, "heads": 0.22, "ring": 0.08}  # the most by which a call of two GPUs on record is off; tests hold it


class Link(NamedTuple):
    """The least seconds of an exchange, and the bytes a second that a rank then receives."""

    start: float
    rate: float


MESSAGES = Link(70e-6, 230e9)  # NCCL 2.28
COPIES = Link(20e-6, 340e9)  # by copy engines
EXCHANGED = Link(7e-6, 300e9)  # a launch, a flag and a read there: what each takes alone, not measured as one
PUSHED = Link(20e-6, 300e9)  # two barriers; 335e9 of what kernels write, and the last sum


class Cost(NamedTuple):
    """Bytes that a rank receives at most, and the seconds that they take; None where not known."""

    received: int
    seconds: float | None

    @classmethod
    def by(cls, link: Link | None, received: int) -> Cost:
        return cls(received, None if link is None else link.start + received / link.rate)

    def __str__(self) -> str:
        return f"{self.received / 1e6:.1f} MB received{in_time(self.seconds)}"


def in_time(seconds: float | None) -> str:
    return "" if seconds is None else f" in some {1e3 * seconds:.2f} ms"


def received_by_keys(cut: Cut, needed: list[list[range]], of_token: int) -> int:
    """Bytes of keys and values that a rank receives at most, for what each rank needs; ``of_token``: bytes of a token's."""
    tokens = (sum(map(len, joined(wanted))) - sum(map(len, held)) for wanted, held in zip(needed, cut.chunks, strict=True))
    return max(tokens) * of_token


def received_by_heads(cut: Cut, of_token: int, of_result: int) -> int:
    """Bytes that a rank receives at most if shards are exchanged for heads, and results back. ``of_token``, ``of_result``:
    bytes of a token's queries, keys and values, and of its result, in all heads."""
    ranks, shards = len(cut.chunks), [sum(map(len, held)) for held in cut.chunks]
    return max((cut.seqlen - own) * of_token + (ranks - 1) * own * of_result for own in shards) // ranks


def pairs(queries: range, seqlen: int, left: int | None, right: int | None) -> int:
    """Pairs of a query and a key that it sees, of a window from ``left`` before to ``right`` after it; None: no limit."""
    places = np.arange(queries.start, queries.stop)
    first = 0 * places if left is None else np.maximum(places - left, 0)
    last = 0 * places + seqlen if right is None else np.minimum(places + right + 1, seqlen)
    return int((last - first).sum())
