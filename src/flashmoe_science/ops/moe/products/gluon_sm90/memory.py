"""Shared memory of the two kernels: a pipeline of stages, two store buffers a consumer, the barriers, and the tile mailbox."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashmoe_science.ops.pipeline_gluon import make_barriers, make_mailbox


class Memory(NamedTuple):
    """``a`` [stages * consumers, rows, depth], ``w`` [stages, *a tile's weights], ``out`` [2 * consumers, *a store];
    barriers [stages, 1] of full and of empty stages; the mailbox by which the producer publishes two tiles to the consumers."""

    a: Any
    w: Any
    out: Any
    full: Any
    empty: Any
    mailbox: Any


@gluon.jit
def make_memory(
    w_desc, out_desc, ROWS: gl.constexpr, BLOCK_K: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    ARRIVALS: gl.constexpr,
):  # fmt: skip
    """Each consumer has its ``ROWS`` of a stage, which is ``BLOCK_K`` deep; a stage is full after ``ARRIVALS``."""
    dtype: gl.constexpr = w_desc.dtype
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K], dtype)
    a = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], a_layout)
    w = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    out = gl.allocate_shared_memory(dtype, [2 * CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    full, empty = make_barriers(STAGES, CONSUMERS, ARRIVALS)
    mailbox = make_mailbox(3, CONSUMERS)
    fence_async_shared()
    return Memory(a, w, out, full, empty, mailbox)
