"""Rows that a kernel reads from the memory of other GPUs of this host, by a table of addresses.

A rank writes what it has into its buffer; a barrier; each rank reads its part of every buffer; a barrier, after which buffers
may be written again. Calls are on one stream. They can be captured in a CUDA graph, which all ranks then replay alike.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from flashmoe_science.ops.launch import address, argument, cdiv, kept_build, next_power_of_2, stand_in
from flashmoe_science.parallel.symmetric import Symmetric
from flashmoe_science.parallel.transport import sums_of

_BLOCK, _COLUMNS, _WARPS = 4096, 1024, 4  # elements of a program that copies, columns of one that sums; warps of both
_WORD = torch.int16  # of any dtype's memory


@triton.jit(do_not_specialize=["start", "length", "rank", "own"])
def flashmoe_pull(addresses, out, start, length, rank, own, RANKS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """out[source, :length] = the elements from ``start + own * length`` on of each rank's buffer. ``addresses``: of the
    buffers; ``UNIT`` divides start and length."""
    start, length = (start // UNIT).to(tl.int64) * UNIT, (length // UNIT).to(tl.int64) * UNIT
    source = (rank + tl.program_id(1)) % RANKS  # each rank begins with another
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    peer = tl.multiple_of(tl.load(addresses + source).to(tl.pointer_type(out.dtype.element_ty)), 16)
    # Not by L1, which may have a peer's lines of a call before.
    value = tl.load(peer + start + own * length + place, mask=place < length, cache_modifier=".cg")
    tl.store(out + source * length + place, value, mask=place < length)


@triton.jit(do_not_specialize=["length", "rank"])
def flashmoe_pull_sums(
    addresses, weights, places, out, length, rank, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[token] = the sum over n < TOP_K of weight times row ``rank * length + place % length`` of buffer ``place // length``.
    A place below 0 adds nothing. ``weights``: None for 1. ``places``: None for row ``token`` of each rank."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    acc = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(TOP_K):
        place = n * length + token
        if places is not None:
            place = tl.load(places + token * TOP_K + n).to(tl.int64)
        here = place >= 0
        peer = tl.load(addresses + tl.where(here, place // length, 0)).to(tl.pointer_type(out.dtype.element_ty))
        at = tl.multiple_of(peer, 16) + (rank * length + tl.where(here, place % length, 0)).to(tl.int64) * WIDTH + columns
        if weights is not None:
            weight = tl.load(weights + token * TOP_K + n).to(tl.float32)
        value = tl.load(at, mask=here & (columns < WIDTH), other=0.0, cache_modifier=".cg").to(tl.float32)  # [BLOCK]
        if weights is not None:
            value = weight * value
        acc += tl.where(here, value, 0.0)
    tl.store(out + token * WIDTH + columns, acc.to(out.dtype.element_ty), mask=columns < WIDTH)


def pull(addresses: torch.Tensor, out: torch.Tensor, rank: int, own: int, start: int = 0) -> None:
    """Fill out [N, length], of _WORD, by flashmoe_pull from buffers at the addresses, int64 [N]."""
    ranks, length = out.shape
    constexprs = (ranks, 8 if (length | start) % 8 == 0 else 1, _BLOCK)
    key = (out.device, out.data_ptr() % 16, constexprs)
    built = kept_build(key, flashmoe_pull, (*map(stand_in, (addresses, out)), 2, 2, 2, 2, *constexprs), num_warps=_WARPS)
    built.launch((cdiv(length, _BLOCK), ranks, 1), address(addresses), address(out), start, length, rank, own, *constexprs)


def pull_sums(
    addresses: torch.Tensor,
    out: torch.Tensor,
    length: int,
    rank: int,
    weights: torch.Tensor | None,
    places: torch.Tensor | None,
) -> None:
    """Fill out [T, width] by flashmoe_pull_sums from buffers of ``length`` rows for each rank; weights, places: [T, K]."""
    tokens, width = out.shape
    top_k = len(addresses) if places is None else places.shape[1]
    constexprs = (top_k, width, min(_COLUMNS, max(16, next_power_of_2(width))))
    given = (addresses, weights, places, out)
    key = (out.device, constexprs, *(None if one is None else (one.dtype, one.data_ptr() % 16) for one in given))
    built = kept_build(key, flashmoe_pull_sums, (*map(stand_in, given), 2, 2, *constexprs), num_warps=_WARPS)
    built.launch((tokens, cdiv(width, constexprs[2]), 1), *map(argument, given), length, rank, *constexprs)


class Peers:
    """The transport by symmetric memory, between GPUs of one host.

    Raises:
        RuntimeError: PyTorch cannot map the ranks' memory into each other's.
    """

    selective = True

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        """``size``: bytes of the most that a call has for the others at once."""
        self._memory = Symmetric(group, cdiv(size, 16) * 16)
        self._rank, self._ranks = group.rank(), group.size()

    def gather(self, *own: torch.Tensor) -> list[torch.Tensor]:
        everyones = [one.new_empty(self._ranks * one.shape[0], *one.shape[1:]) for one in own]
        self._moved(own, everyones, 0)
        return everyones

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        self._moved((x,), [received], self._rank)
        return received

    def summed(
        self, x: torch.Tensor, tokens: int, weights: torch.Tensor | None = None, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.dtype == torch.float64:  # which the kernel would sum in fp32
            rows = torch.arange(x.shape[0], device=x.device).view(self._ranks, -1)[:, :tokens].t()
            return sums_of(self.exchange(x), weights, rows if places is None else places)
        weights, places = (None if one is None else one.contiguous() for one in (weights, places))
        out = x.new_empty(tokens, *x.shape[1:])
        self._write((x,))
        self._memory.barrier()
        if tokens:
            length = x.shape[0] // self._ranks
            pull_sums(self._memory.addresses, out, length, self._rank, weights, places)
        self._memory.barrier()
        return out

    def _moved(self, given: tuple[torch.Tensor, ...], out: list[torch.Tensor], own: int) -> None:
        starts = self._write(given)
        self._memory.barrier()
        for one, start in zip(out, starts, strict=True):
            pull(self._memory.addresses, one.flatten().view(_WORD).view(self._ranks, -1), self._rank, own, start)
        self._memory.barrier()

    def _write(self, given: tuple[torch.Tensor, ...]) -> list[int]:
        """The place in the buffer, in words, of each tensor, which is copied there."""
        words = [one.flatten().view(_WORD) for one in given]
        starts = list(accumulate((cdiv(one.numel(), 8) * 8 for one in words), initial=0))
        for one, start in zip(words, starts, strict=False):
            self._memory.own.view(_WORD)[start : start + one.numel()].copy_(one)
        return starts[:-1]

    def __repr__(self) -> str:
        return f"symmetric memory, {self._memory.size / 1e6:.1f} MB of each GPU"
