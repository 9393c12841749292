"""Rows that GPUs of one host write into each other's memory, through a table of addresses.

Each rank's buffer has a part for what a call begins with, tokens and their routing, and one for results. All ranks write into
one part, meet at a barrier, and read their own. The parts take turns, so that none is overwritten while it is read: behind the
barrier of one all have read the other. Where a part follows itself there is one more barrier. Calls are on one stream. They can
be captured in a CUDA graph, which all ranks then replay alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from flashmoe_science.ops.launch import Grid, Pointer, argument, cdiv, kept_build, next_power_of_2, stand_in, workspace_bytes
from flashmoe_science.ops.moe.call import Rows
from flashmoe_science.parallel.cost import PUSHED, Link
from flashmoe_science.parallel.symmetric import Symmetric
from flashmoe_science.parallel.transport import Sizes, Transport

_BLOCK, _COLUMNS, _WARPS = 4096, 1024, 4  # elements of a program that copies, columns of one that sums; warps of both
_WORD = torch.int16  # of any dtype's memory


@triton.jit
def _buffer(addresses, rank, like):
    """The buffer of a rank, of elements like those of ``like``."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit(do_not_specialize=["tokens", "length", "rank"])
def flashmoe_dispatch(
    of_x, of_weights, of_ids, x, weights, ids, tokens, length, rank,
    RANKS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a token into every buffer, as row ``rank * length + token``: zeros past the last. Its ids, if there are any, count
    from the first of a rank's experts; -1: not that rank's. ``of_x``, ``of_weights``, ``of_ids``: addresses of each part."""
    token = tl.program_id(0).to(tl.int64)
    row, here = rank * length + token, token < tokens
    for first in tl.static_range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)  # [BLOCK]
        value = tl.load(x + token * WIDTH + columns, mask=here & (columns < WIDTH), other=0.0)
        for n in tl.static_range(RANKS):
            to = _buffer(of_x, (rank + 1 + n) % RANKS, x)  # each rank begins with another
            tl.store(to + row * WIDTH + columns, value, mask=columns < WIDTH)
    if ids is not None:
        wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
        choice = tl.arange(0, PLACES)  # [PLACES]
        expert = tl.load(ids + token * TOP_K + choice, mask=here & (choice < TOP_K), other=-1)
        weight = tl.load(weights + token * TOP_K + choice, mask=here & (choice < TOP_K), other=0.0).to(wide)
        for n in tl.static_range(RANKS):
            local = expert - n * EXPERTS
            local = tl.where((local >= 0) & (local < EXPERTS), local, -1).to(tl.int32)
            to_weights, to_ids = (
                tl.load(of_weights + n).to(tl.pointer_type(wide)),
                tl.load(of_ids + n).to(tl.pointer_type(tl.int32)),
            )
            tl.store(to_weights + row * TOP_K + choice, weight, mask=choice < TOP_K)
            tl.store(to_ids + row * TOP_K + choice, local, mask=choice < TOP_K)


@triton.jit(do_not_specialize=["pairs", "length", "rank"])
def flashmoe_send(
    addresses, rows, tables, weights, pairs, length, rank,
    RANKS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what this rank has of a token into its rank's buffer: the sum of its rows times weights, as row ``rank * length +
    token``; without weights each row, as row ``token * TOP_K`` plus the place of its choice."""
    other = (rank + 1 + tl.program_id(0) % RANKS) % RANKS  # what crosses and what stays are written side by side
    token = (tl.program_id(0) // RANKS).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    first, to = (other * length + token) * TOP_K, _buffer(addresses, other, rows)
    acc = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(TOP_K):
        row = tl.load(tables + pairs + first + n).to(tl.int64)
        here = (row >= 0) & (columns < WIDTH)
        value = tl.load(rows + row * WIDTH + columns, mask=here, other=0.0)  # [BLOCK]
        if weights is None:
            tl.store(to + (token * TOP_K + n) * WIDTH + columns, value, mask=here)
        else:
            weight = tl.load(weights + first + n).to(tl.float32)
            acc += tl.where(row >= 0, weight * value.to(tl.float32), 0.0)
    if weights is not None:
        value = acc.to(rows.dtype.element_ty)
        tl.store(to + (rank * length + token) * WIDTH + columns, value, mask=columns < WIDTH)


@triton.jit(do_not_specialize=["experts", "per_part"])
def flashmoe_sum_received(
    received, weights, ids, out, experts, per_part,
    PARTS: tl.constexpr, PER_TOKEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[token] = the sum over n < PARTS of the rows ``token * PER_TOKEN + n * per_part``; with ids of those of choices from 0
    to ``experts`` alone, times their weights."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    acc = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(PARTS):
        here = token >= 0
        if ids is not None:
            expert = tl.load(ids + token * PARTS + n)
            here = (expert >= 0) & (expert < experts)
        at = received + (token * PER_TOKEN + n * per_part) * WIDTH + columns
        value = tl.load(at, mask=here & (columns < WIDTH), other=0.0).to(tl.float32)  # [BLOCK]
        if ids is not None:
            value = tl.load(weights + token * PARTS + n).to(tl.float32) * value
        acc += tl.where(here, value, 0.0)
    tl.store(out + token * WIDTH + columns, acc.to(out.dtype.element_ty), mask=columns < WIDTH)


@triton.jit(do_not_specialize=["length", "rank"])
def flashmoe_push(addresses, x, length, rank, RANKS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Write x[other, :length] into each buffer, from ``rank * length`` on. ``UNIT`` divides the length."""
    length = (length // UNIT).to(tl.int64) * UNIT
    other = (rank + 1 + tl.program_id(1)) % RANKS
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    value = tl.load(x + other * length + place, mask=place < length)
    tl.store(_buffer(addresses, other, x) + rank * length + place, value, mask=place < length)


def dispatch(addresses: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None], sizes: Sizes, rank: int) -> None:
    """By flashmoe_dispatch: x, weights and ids, of which the last two may be None, into the parts at the addresses."""
    (tokens, width, top_k, experts, _), (x, *_) = sizes, given
    assert x is not None
    constexprs = (len(addresses[0]), experts, top_k, next_power_of_2(top_k), width, _columns(width, _BLOCK))
    launch(flashmoe_dispatch, (tokens, 1, 1), (*addresses, *given), (len(x), tokens, rank), constexprs)


def send(addresses: torch.Tensor, rows: Rows, weights: torch.Tensor | None, sizes: Sizes, rank: int) -> None:
    """By flashmoe_send: rows of all ranks' tokens, times ``weights`` of a reduced result, into the buffers at the addresses."""
    ranks, (tokens, width, top_k, _, dtype) = len(addresses), sizes
    constexprs = (ranks, top_k, width, _columns(width, _COLUMNS))
    grid, integers = (ranks * tokens, cdiv(width, constexprs[-1]), 1), (ranks * tokens * top_k, tokens, rank)
    like = stand_in(addresses), Pointer(dtype), Pointer(torch.int32), stand_in(weights)
    launch(flashmoe_send, grid, (addresses, rows.rows, rows.tables, weights), integers, constexprs, like)


def sum_received(
    received: torch.Tensor, out: torch.Tensor, sizes: Sizes, ranks: int,
    weights: torch.Tensor | None = None, ids: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill out [tokens, H] by flashmoe_sum_received. Weights and ids: [tokens, K] of an exact result, None of a reduced one."""
    width, parts = sizes.hidden, ranks if ids is None else sizes.top_k
    constexprs = (parts, 1 if ids is None else parts, width, _columns(width, _COLUMNS))
    grid, integers = (len(out), cdiv(width, constexprs[-1]), 1), (ranks * sizes.experts, sizes.tokens if ids is None else 1)
    launch(flashmoe_sum_received, grid, (received, weights, ids, out), integers, constexprs)


def push(addresses: torch.Tensor, x: torch.Tensor, rank: int) -> None:
    """By flashmoe_push: x [N, length], of _WORD, into the buffers at the addresses."""
    ranks, length = x.shape
    constexprs = (ranks, 8 if length % 8 == 0 else 1, _BLOCK)
    launch(flashmoe_push, (cdiv(length, _BLOCK), ranks, 1), (addresses, x), (length, rank), constexprs)


def launch(
    function: triton.JITFunction, grid: Grid, pointers: Sequence[Any], integers: tuple[int, ...], constexprs: tuple[int, ...],
    like: Sequence[Pointer | None] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Launch a kernel of such parameters in this order. ``like``: stand-ins of pointers that are no tensors. ``options``: of
    the build."""
    like = like or tuple(map(stand_in, pointers))
    key = (pointers[0].device, constexprs, *(None if one is None else (one.dtype, one.data_ptr()) for one in like))
    built = kept_build(key, function, (*like, *[2] * len(integers), *constexprs), num_warps=_WARPS, **options)
    arguments = (argument(one) if one is None or isinstance(one, torch.Tensor) else one for one in pointers)
    built.launch(grid, *arguments, *integers, *constexprs)


def _columns(width: int, most: int) -> int:
    return min(most, max(16, next_power_of_2(width)))


class Peers(Transport):
    """By symmetric memory of GPUs of one host. Raises RuntimeError: PyTorch cannot map the ranks' memory into each other's."""

    link: Link | None = PUSHED
    sends = True

    def __init__(self, group: dist.ProcessGroup, sizes: Sizes) -> None:
        super().__init__(group, sizes)
        tokens, hidden, top_k, _, dtype = sizes
        places, wide = self._ranks * tokens, sizes.wide
        # Tokens and their routing, then results: rows of choices, or the gradients of their weights.
        parts = (places * hidden, dtype), (places * top_k, wide), (places * top_k, torch.int32)
        results = places * top_k * max(hidden * dtype.itemsize, wide.itemsize), torch.uint8
        ends = list(accumulate(map(workspace_bytes, ([part] for part in (*parts, results)))))
        self._memory, starts = Symmetric(group, ends[-1]), (0, *ends)
        self._addresses = [self._memory.addresses + start for start in starts[:4]]
        self._everyones = [
            self._memory.own[start : start + count * of.itemsize].view(of).view(places, -1)
            for start, (count, of) in zip(starts, parts, strict=False)
        ]
        self._results: torch.Tensor = self._memory.own[starts[3] :]
        self._last = ""

    def dispatch(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, kept: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._dispatch(x, weights, ids)
        everyones_x, everyones_weights, local_ids = [one.clone() for one in self._everyones] if kept else self._everyones
        return everyones_x, everyones_weights, local_ids

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self._dispatch(x, None, None)
        everyones: torch.Tensor = self._everyones[0].clone()
        self._memory.barrier()  # a backward may end here, and tokens follow
        self._last = ""
        return everyones

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._begin("results")
        push(self._addresses[3], x.flatten().view(_WORD).view(self._ranks, -1), self._rank)
        self._memory.barrier()
        return self._results[: x.nbytes].view(x.dtype).view(x.shape)

    def sent(self, rows: Rows, of_all: torch.Tensor | None, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(ids), self._sizes.hidden, dtype=self._sizes.dtype, device=ids.device)
        self._begin("results")
        send(self._addresses[3], rows, of_all, self._sizes, self._rank)
        self._memory.barrier()
        if len(ids):
            routing = () if of_all is not None else (weights.contiguous(), ids.contiguous())
            sum_received(self._results.view(out.dtype), out, self._sizes, self._ranks, *routing)
        return out

    def _dispatch(self, *given: torch.Tensor | None) -> None:
        self._begin("tokens")
        dispatch(self._addresses[:3], [None if one is None else one.contiguous() for one in given], self._sizes, self._rank)
        self._memory.barrier()

    def _begin(self, part: str) -> None:
        """Let all ranks have read a part of their buffers before it is written again."""
        if self._last == part:
            self._memory.barrier()
        self._last = part

    def __repr__(self) -> str:
        return f"symmetric memory, {self._memory.size / 1e6:.1f} MB of each GPU"
