"""Shared memory of the two kernels: a pipeline of stages, store buffers, what two consumers tell each other, the mailbox."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashmoe_science.ops.moe.products.stream_k import Segment
from flashmoe_science.ops.pipeline_gluon import make_barriers, make_mailbox, make_row

BLOCK = gl.constexpr(256)  # rows of weights of a tile
STEP = gl.constexpr(128)  # K of a stage, which a block of weights and one of tokens share a scale in
CONSUMERS = gl.constexpr(2)
_NUMBERS = gl.constexpr(len(Segment._fields))
_ARRIVALS = gl.constexpr(1 + 32)  # at a full stage: of the copy engine, and of each thread that copies scales


class Memory(NamedTuple):
    """``w`` [stages * consumers, *a consumer's codes of a stage], ``a`` [stages, tokens, STEP], ``of_a`` [stages, tokens],
    ``out`` [consumers, *a store], ``largest`` [2 * consumers, tokens]; barriers [stages, 1] of full and of empty stages, and
    [1, 1] of consumers that meet; the mailbox by which the producer publishes segments."""

    w: Any
    a: Any
    of_a: Any
    out: Any
    largest: Any
    full: Any
    empty: Any
    met: Any
    mailbox: Any


@gluon.jit
def make_memory(a_desc, w_desc, out_desc, STAGES: gl.constexpr, MEET: gl.constexpr):
    """``MEET``: whether consumers tell each other numbers of their tokens."""
    TOKENS: gl.constexpr = a_desc.block_type.shape[0]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    w = gl.allocate_shared_memory(w_desc.dtype, [CONSUMERS * STAGES] + w_desc.block_type.shape, w_desc.layout)
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    of_a = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], plain)
    out = gl.allocate_shared_memory(out_desc.dtype, [CONSUMERS] + out_desc.block_type.shape, out_desc.layout)
    full, empty = make_barriers(STAGES, CONSUMERS, _ARRIVALS)
    largest, met = of_a, full  # of consumers that do not meet, which use neither (make_row)
    if MEET:
        largest = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, TOKENS], plain)
        met = make_row(1, CONSUMERS)
    mailbox = make_mailbox(_NUMBERS, CONSUMERS)
    fence_async_shared()
    return Memory(w, a, of_a, out, largest, full, empty, met, mailbox)
