"""The Gluon calls that changed between Triton 3.6 and 3.9, under one name each, and Triton's functions as Gluon's."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Renamed in 3.8; in 3.9 the old names still exist and raise, so the new ones are looked for first.
if hasattr(tma, "async_load"):
    tma_load, tma_store = tma.async_load, tma.async_store
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global


def _tma_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """Add what is in shared memory to a tile of a tensor; before 3.8 only the builder knows how."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


tma_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else builtin(_tma_add)
_Memory = gl.shared_memory_descriptor
reinterpret = _Memory.reinterpret if hasattr(_Memory, "reinterpret") else _Memory._reinterpret  # (memory, dtype, shape, layout)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # of the threads of a partition
cp_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
cp_async_arrive = async_copy.mbarrier_arrive


def as_gluon(function: Any) -> Any:
    """A ``triton.jit`` function of elementwise operations, to be called in a Gluon kernel."""
    return gluon.jit(function.fn)


def _tma_stored() -> None:
    """Wait until all that the warp copied or added to global memory is there, and not only read, which ``tma.store_wait`` of
    3.6 waits for."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r,~{memory}", [lane], gl.int32, False, 1)


tma_stored = gluon.jit(_tma_stored)
