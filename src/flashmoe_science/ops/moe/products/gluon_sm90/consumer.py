"""A consumer of the two kernels: it multiplies the stages of 64 rows, and its epilogue activates and stores them.

A consumer whose rows are past the expert's end releases the stages and multiplies nothing. Gates and ups alternate in eights of
a tile's weights (``config.py``): the gate and the up of a column are in one thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashmoe_science.ops.descriptors import RAGGED_ROWS
from flashmoe_science.ops.gluon_bridge import as_gluon, tma_store
from flashmoe_science.ops.moe.activation import activated
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, receive

_activated = as_gluon(activated)


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) by the hardware's reciprocal and power of two, each off by 2^-22 of its value, far below a rounding to
    16 bits. ``activated`` guards them against results below 2^-126, with twice the instructions; here those are 0."""
    power = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], gl.float32, True, 1)
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [power + 1.0], gl.float32, True, 1)


@gluon.jit
def halves(block):
    """The left and the right half of the columns of a block, which stay in the threads that have them."""
    ROWS: gl.constexpr = block.shape[0]
    HALF: gl.constexpr = block.shape[1] // 2
    return block.reshape([ROWS, 2, HALF]).permute(0, 2, 1).split()  # two of [ROWS, HALF]


@gluon.jit
def store(block, out_desc, row, end, column, buffers, NTH: gl.constexpr):
    """Write a block by way of shared memory, but for rows from ``end`` on and columns past the last one. Without ``end`` row is
    an expert, and a row of its. ``NTH``: the block's first copy's number among a tile's; copies take the buffers in turn."""
    WIDTH: gl.constexpr = out_desc.block_type.shape[3]
    ROWS: gl.constexpr = block.shape[0]
    HALF: gl.constexpr = block.shape[1] // 2
    if HALF >= WIDTH:
        left, right = halves(block)
        store(left, out_desc, row, end, column, buffers, NTH)
        store(right, out_desc, row, end, column + HALF, buffers, NTH + HALF // WIDTH)
    else:
        buffer = buffers[NTH % len(buffers)]
        tma.store_wait(len(buffers) - 1)  # the last copy from this buffer has left it
        here = buffer.reshape([out_desc.block_type.shape[2], WIDTH]).slice(0, ROWS, 0)
        here.store(block.to(out_desc.dtype))
        fence_async_shared()
        if end is None:
            tma_store(out_desc, [0, row[0], row[1], column], buffer)
        else:
            tma_store(out_desc, [RAGGED_ROWS, end, RAGGED_ROWS - (end - row), column], buffer)


@gluon.jit
def _activate(acc, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, DTYPE: gl.constexpr):
    """The activation of products whose columns are gates and ups in turn, eight and eight. A few columns after the others:
    intermediate values take registers."""
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1] // 2
    if WIDTH > 16:
        left, right = halves(acc)
        one = _activate(left, FUNCTION, ALPHA, LIMIT, DTYPE)
        two = _activate(right, FUNCTION, ALPHA, LIMIT, DTYPE)
        return gl.join(one, two).permute(0, 2, 1).reshape([ROWS, WIDTH])
    else:
        gate, up = acc.reshape([ROWS, WIDTH // 8, 2, 8]).permute(0, 1, 3, 2).split()  # [ROWS, WIDTH / 8, 8]
        if FUNCTION == "silu":
            active = gate * sigmoid(gate) * up
        else:
            active = _activated(gate, up, FUNCTION, True, ALPHA, LIMIT)
        return active.reshape([ROWS, WIDTH]).to(DTYPE)


@gluon.jit
def _part(acc, PART: gl.constexpr, DTYPE: gl.constexpr):
    """The gates, or the ups, of products whose columns are gates and ups in turn, eight and eight."""
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1] // 2
    parts = acc.reshape([ROWS, WIDTH // 8, 2, 8]).permute(0, 1, 3, 2).split()  # two of [ROWS, WIDTH / 8, 8]
    return parts[PART].reshape([ROWS, WIDTH]).to(DTYPE)


@gluon.jit
def multiply(
    acc, state, memory,
    CONSUMER: gl.constexpr, STEPS: gl.constexpr, GATHERED: gl.constexpr, TRANSPOSED: gl.constexpr = False,
):  # fmt: skip
    """The sums [ROWS, BLOCK_N] of ``STEPS`` stages; each stage is released when the product after it has begun.
    ``TRANSPOSED``: weights are [depth, BLOCK_N] in a stage."""
    STAGES: gl.constexpr = memory.w.shape[0]
    CONSUMERS: gl.constexpr = memory.a.shape[0] // STAGES
    for step in range(STEPS):
        stage = state.stage
        mbarrier.wait(memory.full.index(stage), state.phase)
        if GATHERED:
            fence_async_shared()  # cp.async writes as threads do, the matrix instruction reads as the copy engine does
        if TRANSPOSED:
            w = memory.w.index(stage).reshape([memory.a.shape[2], acc.shape[1]])  # [BLOCK_K, BLOCK_N]
        else:
            w = memory.w.index(stage).reshape([acc.shape[1], memory.a.shape[2]]).permute((1, 0))
        acc = warpgroup_mma(memory.a.index(CONSUMERS * stage + CONSUMER), w, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, (acc,))
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(memory.empty.index(before), pred=step > 0)
        state = advance(state, STAGES)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(memory.empty.index(gl.where(state.stage == 0, STAGES - 1, state.stage - 1)))
    return acc, state


@gluon.jit
def consume(
    out_desc, gates_desc, ups_desc, memory,
    CONSUMER: gl.constexpr, DEPTH: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    TRANSPOSED: gl.constexpr = False,
):  # fmt: skip
    """The ``ROWS`` rows of one consumer of every tile of this program. Without ``FUNCTION`` products are stored as they are;
    with gates_desc and ups_desc they are too, before they are activated."""
    STAGES: gl.constexpr = memory.w.shape[0]
    ROWS: gl.constexpr = memory.a.shape[1]
    BLOCK_K: gl.constexpr = memory.a.shape[2]
    BLOCK_N: gl.constexpr = memory.w.numel // (STAGES * BLOCK_K)
    STEPS: gl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    state = first_stage()
    iteration = gl.to_tensor(0)
    buffers = (memory.out.index(2 * CONSUMER), memory.out.index(2 * CONSUMER + 1))
    column, row, end = receive(memory.mailbox, iteration, one)
    while column >= 0:
        iteration += 1
        first = row + CONSUMER * ROWS
        if first < end:
            acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
            acc, state = multiply(acc, state, memory, CONSUMER, STEPS, FUNCTION is not None, TRANSPOSED)
            if gates_desc is not None:
                store(_part(acc, 0, out_desc.dtype), gates_desc, first, end, column * (BLOCK_N // 2), buffers, 0)
                store(_part(acc, 1, out_desc.dtype), ups_desc, first, end, column * (BLOCK_N // 2), buffers, 0)
            if FUNCTION is not None:
                active = _activate(acc, FUNCTION, ALPHA, LIMIT, out_desc.dtype)  # [ROWS, BLOCK_N / 2]
                store(active, out_desc, first, end, column * (BLOCK_N // 2), buffers, 0)
            else:
                store(acc, out_desc, first, end, column * BLOCK_N, buffers, 0)
        else:
            for step in range(STEPS):
                mbarrier.wait(memory.full.index(state.stage), state.phase)
                mbarrier.arrive(memory.empty.index(state.stage))
                state = advance(state, STAGES)
        column, row, end = receive(memory.mailbox, iteration, one)
    tma.store_wait(0)
