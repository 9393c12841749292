"""Keys and values fetched by the copy engines of one host's GPUs, while the calls that need them wait or run.

A rank writes its shards into its buffer, and the others read them. There are two barriers before the first call: no rank still
reads the last call's shards; all have written. A barrier beside an attention kernel would wait for an SM, or occupy it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from flashmoe_science.ops.checks import check_count
from flashmoe_science.parallel.agree import agreed
from flashmoe_science.parallel.layout import Cut, process_group
from flashmoe_science.parallel.symmetric import Symmetric, why_no_symmetric


class Copy(NamedTuple):
    """Tokens of the sequence that a rank's shard has from ``row`` on."""

    rank: int
    row: int
    tokens: range


def copies_of(chunks: list[list[range]], wanted: list[range]) -> list[Copy]:
    """The copies that fill the ranges ``wanted`` from the ranks' chunks, in the order of the sequence."""
    found = []
    for rank, held in enumerate(chunks):
        for chunk, first in zip(held, accumulate(map(len, held), initial=0), strict=False):
            for one in wanted:
                tokens = range(max(chunk.start, one.start), min(chunk.stop, one.stop))
                if tokens:
                    found.append(Copy(rank, first + tokens.start - chunk.start, tokens))
    return sorted(found, key=lambda copy: copy.tokens.start)


class ContextWorkspace:
    """Buffers in which ``context_attention`` copies keys and values between GPUs of one host. All ranks make it together.

    Any number of layers and calls on one stream may share it. A CUDA graph can capture them.

    Args:
        group: a ProcessGroup of nccl, or a 1-D DeviceMesh.
        max_bytes: the most that the keys and values of a rank take in a call. The buffer of each GPU is as large.

    Raises:
        TypeError, ValueError: no group that this rank is in, or one without NCCL; max_bytes below 1; on every rank, if the
            ranks' numbers differ.
        RuntimeError: PyTorch cannot map the ranks' memory into each other's.
    """

    def __init__(self, group: object, max_bytes: int) -> None:
        self.group = process_group(group)
        with agreed(self.group) as facts:
            facts["max_bytes"] = max_bytes
            check_count(max_bytes, "max_bytes", 1)
            if why := why_no_symmetric(self.group):
                raise ValueError(f"a ContextWorkspace is asked for, and {why}")
        self.max_bytes = max_bytes
        self._memory = Symmetric(self.group, max_bytes)
        self._buffers = [self._memory.of(rank) for rank in range(self.group.size())]
        self._stream = torch.cuda.Stream(priority=-1)
        self._arrived: list[tuple[int, torch.cuda.Event]] = []  # the first token of each copy, and its end

    def start(self, shards: Sequence[torch.Tensor], held: Cut, wanted: list[range], into: list[list[torch.Tensor]]) -> None:
        """Begin to fill ``into``: for each shard, a contiguous tensor for each range in ``wanted``; ``wait`` waits for it."""
        me, main = self.group.rank(), torch.cuda.current_stream()
        of_ranks = [self._shards(rank, shards, held) for rank in range(self.group.size())]
        copies = copies_of(held.chunks, wanted)
        self._stream.wait_stream(main)
        self._arrived.clear()
        with torch.cuda.stream(self._stream):
            self._memory.barrier()
            for place, shard in zip(of_ranks[me], shards, strict=True):
                place.copy_(shard)
            self._memory.barrier()
            written = self._stream.record_event()
            for one in copies:
                if one.rank != me:
                    _copy(one, of_ranks[one.rank], wanted, into)
                    self._arrived.append((one.tokens.start, self._stream.record_event()))
        main.wait_event(written)
        for one in copies:
            if one.rank == me:
                _copy(one, shards, wanted, into)

    def wait(self, tokens: range) -> None:
        """Let the current stream wait for these tokens of the sequence."""
        needed = [end for first, end in self._arrived if first < tokens.stop]
        if needed:
            torch.cuda.current_stream().wait_event(needed[-1])

    def _shards(self, rank: int, shards: Sequence[torch.Tensor], held: Cut) -> list[torch.Tensor]:
        """A rank's shards in its buffer, like this rank's except for the number of tokens."""
        tokens, found, first = sum(map(len, held.chunks[rank])), [], 0
        for shard, size in zip(shards, sizes_of(shards, held), strict=True):
            rows = self._buffers[rank][first : first + size].view(shard.dtype).view(-1, *shard.shape[1:])
            found.append(rows[:tokens])
            first += size
        return found

    def __repr__(self) -> str:
        return f"ContextWorkspace({self.group.size()} ranks, {self.max_bytes / 1e6:.1f} MB of each GPU)"


def sizes_of(shards: Sequence[torch.Tensor], held: Cut) -> list[int]:
    """Bytes of each shard, tokens first, on the rank that has the most tokens."""
    most = max(sum(map(len, chunks)) for chunks in held.chunks)
    return [most * shard[:1].numel() * shard.element_size() for shard in shards]


def _copy(one: Copy, shards: Sequence[torch.Tensor], wanted: list[range], into: list[list[torch.Tensor]]) -> None:
    n = next(n for n, each in enumerate(wanted) if one.tokens.start in each)
    first, rows = one.tokens.start - wanted[n].start, len(one.tokens)
    for shard, places in zip(shards, into, strict=True):
        places[n].narrow(0, first, rows).copy_(shard.narrow(0, one.row, rows))
