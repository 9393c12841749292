"""Bytes that stay in use after a call, once its results and its inputs are gone."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from itertools import pairwise

import torch

from flashmoe_science.measure.bench import Bench

_ROUNDS, _CALLS = 3, 6
_SMALL = 64  # bytes of a small object of Python, whose memory the heap does not show


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    ]


def live_bytes(bench: Bench) -> int:
    """Bytes in use: of Python's small objects, of the C library's heap, as far as there is glibc, and of a GPU's memory that
    PyTorch's allocator gave."""
    gc.collect()
    bench.synchronize()
    on_gpu = 0 if bench.gpu is None else torch.cuda.memory_allocated(bench.device)
    small = sys.getallocatedblocks() * _SMALL
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return small + on_gpu
    mallinfo.restype = _Mallinfo
    heap = mallinfo()
    return int(heap.uordblks + heap.hblkhd) + small + on_gpu


def growth(round_of_calls: Callable[[int], None], bench: Bench) -> int:
    """Bytes that each call leaves in use beyond the one before: the least of a few rounds, after one that fills caches."""
    round_of_calls(_CALLS)
    seen = [live_bytes(bench)]
    gc.freeze()  # what lives now is not looked through again at each reading
    for _ in range(_ROUNDS):
        round_of_calls(_CALLS)
        seen.append(live_bytes(bench))
    return min(after - before for before, after in pairwise(seen)) // _CALLS
