"""Parts of attention on GPUs of one host, exchanged and merged by one launch a rank, through symmetric memory.

A rank's buffer has flags [ranks, programs], then two slots for a part: its log-sum-exps and its results. In a call each program
writes its rows into its own rank's slot, then the number of the call, the epoch, as its flag into the others' buffers. It waits
for the same flag of all others, and reads its rows in their slots, in the order of the ranks. The buffers count the epochs, so
that a CUDA graph can be replayed. All programs run in every call, so that they count alike.

Slots take turns, and one wait a call is enough. A rank writes a slot again two calls later. In the call between, it has waited
for a flag of every other rank, which that rank writes once its call before has ended, as calls of a stream follow each other:
the call that read the slot. A flag may be one ahead, of a rank that has gone on, and never two.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from flashmoe_science.ops.attention.device.softmax_triton import add_part
from flashmoe_science.ops.launch import cdiv, next_power_of_2
from flashmoe_science.parallel.peers import launch
from flashmoe_science.parallel.symmetric import TIME_LIMIT_MS, Symmetric

PROGRAMS = 128  # all at once on one GPU, as programs wait for those of others
_ELEMENTS = 2048  # of a step of a program


@triton.jit
def _part(start, rows, like):
    """Pointers to the log-sum-exps and the results, like those of ``like``, of a part of so many rows at an address."""
    results = start + (rows.to(tl.int64) * 4 + 15) // 16 * 16
    return start.to(tl.pointer_type(tl.float32)), tl.multiple_of(results.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _wait(flag, epoch, LIMIT_NS: tl.constexpr):
    """Wait until a flag is of this epoch, or of a later one."""
    began = globaltimer()
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while seen - epoch < 0:
        tl.device_assert(globaltimer() - began < LIMIT_NS, "a rank was later than the time limit; all must be started anew")
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit(do_not_specialize=["rows", "rank", "size"])
def flashmoe_merge_ranks(
    parts, own, results, lse, out, rows, rank, size,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, LIMIT_NS: tl.constexpr,
):  # fmt: skip
    """out [rows, WIDTH] of the parts of all ranks. With this rank's buffer ``own``, ``results`` and ``lse`` ``parts`` are the
    addresses of the ranks' buffers, which have slots of ``size`` bytes; else the parts themselves, ``size`` bytes a rank."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, COLUMNS)[None]  # [1, COLUMNS]
    slot = tl.zeros((), tl.int64)
    if own is not None:
        flags = own.to(tl.pointer_type(tl.int32), bitcast=True) + program
        first_other = tl.load(parts + (rank + 1) % RANKS)  # early: after attention it is in no cache
        epoch = tl.load(flags + rank * programs) + 1
        slot += (RANKS * programs * 4 + 15) // 16 * 16 + (epoch & 1) * size.to(tl.int64)
        to_lse, to_results = _part(own.to(tl.int64) + slot, rows, out)
        for first in range(program * ROWS, rows, programs * ROWS):
            row = first + tl.arange(0, ROWS)  # [ROWS]
            place, here = row[:, None].to(tl.int64) * WIDTH + columns, (row < rows)[:, None] & (columns < WIDTH)
            tl.store(to_lse + row, tl.load(lse + row, mask=row < rows), mask=row < rows)
            tl.store(to_results + place, tl.load(results + place, mask=here), mask=here)
        tl.debug_barrier()  # what all threads have written comes before the flag of one
        for n in tl.static_range(1, RANKS):
            other = first_other if n == 1 else tl.load(parts + (rank + n) % RANKS)
            theirs = other.to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + rank * programs + program, epoch, sem="release", scope="sys")
        tl.store(flags + rank * programs, epoch)
        for n in tl.static_range(1, RANKS):
            _wait(flags + (rank + n) % RANKS * programs, epoch, LIMIT_NS)
    for first in range(program * ROWS, rows, programs * ROWS):
        row = first + tl.arange(0, ROWS)  # [ROWS]
        place, here = row[:, None].to(tl.int64) * WIDTH + columns, (row < rows)[:, None] & (columns < WIDTH)
        highest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for n in tl.static_range(RANKS):
            start = tl.load(parts + n) + slot if own is not None else parts.to(tl.int64) + n * size.to(tl.int64)
            of_lse, of_results = _part(start, rows, out)
            found = tl.load(of_lse + row, mask=row < rows, other=float("-inf"))
            value = tl.load(of_results + place, mask=here, other=0.0).to(tl.float32)  # [ROWS, COLUMNS]
            highest, total, acc = add_part(found, value, highest, total, acc)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=here)


def merge_gathered(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Fill out [..., width] by flashmoe_merge_ranks from the parts [ranks, bytes] of all ranks, laid out as in ``parts.py``."""
    _merge(parts, None, None, None, out, len(parts), 0, parts.shape[1])


class Slots:
    """Memory by which the GPUs of one host exchange parts of up to ``size`` bytes. Every rank makes it at once."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self._rank, self._ranks, self.size = group.rank(), group.size(), size
        flags = cdiv(4 * PROGRAMS * self._ranks, 16) * 16
        self._memory = Symmetric(group, flags + 2 * size)
        self._memory.own[:flags].zero_()
        self._memory.barrier()

    def merge(self, results: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> None:
        """Fill out [..., width] from all ranks' results of this shape and log-sum-exps, fp32. Every rank calls it."""
        _merge(self._memory.addresses, self._memory.own, results, lse, out, self._ranks, self._rank, self.size)


def _merge(
    parts: torch.Tensor, own: torch.Tensor | None, results: torch.Tensor | None, lse: torch.Tensor | None, out: torch.Tensor,
    ranks: int, rank: int, size: int,
) -> None:  # fmt: skip
    width = out.shape[-1]
    columns = max(16, next_power_of_2(width))
    constexprs = (ranks, width, columns, max(1, _ELEMENTS // columns), TIME_LIMIT_MS * 10**6)
    options = {"debug": own is not None, "sanitize_overflow": False}  # else its assertion is not built
    pointers, integers = (parts, own, results, lse, out), (out.numel() // width, rank, size)
    launch(flashmoe_merge_ranks, (PROGRAMS, 1, 1), pointers, integers, constexprs, **options)
