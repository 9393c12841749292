"""Rows that a kernel reads from the memory of other GPUs of this host, by a table of addresses.

A rank writes what it has into its buffer; a barrier; each rank reads its part of every buffer; a barrier, after which buffers
may be written again. Calls are on one stream. They can be captured in a CUDA graph, which all ranks then replay alike.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from flashmoe_science.ops.launch import address, cdiv, kept_build, stand_in
from flashmoe_science.ops.private import symmetric_memory

_BLOCK, _WARPS = 4096, 4  # elements and warps of a program
_TIME_LIMIT_MS = 60_000  # of a barrier, after which it ends the CUDA context
_WORD = torch.int16  # of any dtype's memory


@triton.jit(do_not_specialize=["length", "rank", "own"])
def flashmoe_pull(addresses, out, length, rank, own, RANKS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """out[source, :length] = the elements from ``own * length`` on of each rank's buffer. ``addresses``: of the buffers;
    ``UNIT`` divides the length."""
    length = (length // UNIT).to(tl.int64) * UNIT
    source = (rank + tl.program_id(1)) % RANKS  # each rank begins with another
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    peer = tl.multiple_of(tl.load(addresses + source).to(tl.pointer_type(out.dtype.element_ty)), 16)
    # Not by L1, which may have a peer's lines of a call before.
    value = tl.load(peer + own * length + place, mask=place < length, cache_modifier=".cg")
    tl.store(out + source * length + place, value, mask=place < length)


def pull(addresses: torch.Tensor, out: torch.Tensor, rank: int, own: int) -> None:
    """Fill out [N, length], of _WORD, by flashmoe_pull from buffers at the addresses, int64 [N]."""
    ranks, length = out.shape
    constexprs = (ranks, 8 if length % 8 == 0 else 1, _BLOCK)
    key = (out.device, out.data_ptr() % 16, constexprs)
    built = kept_build(key, flashmoe_pull, (*map(stand_in, (addresses, out)), 2, 2, 2, *constexprs), num_warps=_WARPS)
    built.launch((cdiv(length, _BLOCK), ranks, 1), address(addresses), address(out), length, rank, own, *constexprs)


class Peers:
    """By symmetric memory of GPUs of one host.

    Raises:
        RuntimeError: PyTorch cannot map the ranks' memory into each other's.
    """

    start: float | None = 60e-6  # two barriers, each 26 us of the host; inside a CUDA graph 4 us
    rate = 320e9

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        """``size``: bytes of the largest tensor that a call has for the others."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # PyTorch would create an object that is never used
        symmetric = symmetric_memory()
        self._buffer = symmetric.empty(cdiv(size, 2), dtype=_WORD, device=torch.device("cuda", torch.cuda.current_device()))
        self._handle = symmetric.rendezvous(self._buffer, group)
        self._addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=self._buffer.device)
        self._rank, self._ranks, self._size = group.rank(), group.size(), size

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return self._moved(own, own.new_empty(self._ranks * own.shape[0], *own.shape[1:]), 0)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        return self._moved(x, torch.empty_like(x), self._rank)

    def _moved(self, given: torch.Tensor, out: torch.Tensor, own: int) -> torch.Tensor:
        words = given.flatten().view(_WORD)
        self._buffer[: words.numel()].copy_(words)
        self._handle.barrier(channel=0, timeout_ms=_TIME_LIMIT_MS)
        pull(self._addresses, out.flatten().view(_WORD).view(self._ranks, -1), self._rank, own)
        self._handle.barrier(channel=0, timeout_ms=_TIME_LIMIT_MS)
        return out

    def __repr__(self) -> str:
        return f"symmetric memory, {self._size / 1e6:.1f} MB of each GPU"
