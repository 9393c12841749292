"""Shared memory of the two kernels: a pipeline of stages, a store buffer for each consumer, the barriers, and the mailbox."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashmoe_science.ops.moe.products.stream_k import Segment
from flashmoe_science.ops.moe.products.weights_sm90.operand import chunks_of
from flashmoe_science.ops.pipeline_gluon import make_barriers, make_mailbox

_NUMBERS = gl.constexpr(len(Segment._fields))


class Memory(NamedTuple):
    """``w`` [stages * consumers, *a consumer's bytes of a stage], ``a`` [stages * chunks, tokens, CHUNK], ``out`` [consumers,
    *a store]; barriers [stages, 1] of full and of empty stages; the mailbox by which the producer publishes segments."""

    w: Any
    a: Any
    out: Any
    full: Any
    empty: Any
    mailbox: Any


@gluon.jit
def make_memory(w_desc, a_desc, out_desc, FORMAT: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    w = gl.allocate_shared_memory(gl.uint8, [CONSUMERS * STAGES] + w_desc.block_type.shape, w_desc.layout)
    a = gl.allocate_shared_memory(a_desc.dtype, [chunks_of(FORMAT) * STAGES] + a_desc.block_type.shape, a_desc.layout)
    out = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    full, empty = make_barriers(STAGES, CONSUMERS)
    mailbox = make_mailbox(_NUMBERS, CONSUMERS)
    fence_async_shared()
    return Memory(w, a, out, full, empty, mailbox)
