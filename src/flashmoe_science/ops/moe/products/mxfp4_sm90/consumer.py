"""A consumer of the two kernels: it multiplies 64 or 128 rows of weights by tokens; its epilogue activates and stores.

Weights are the rows of a product and tokens its columns: few tokens then leave no rows of the matrix instruction empty.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flashmoe_science.ops.gluon_bridge import as_gluon
from flashmoe_science.ops.moe.activation import activated
from flashmoe_science.ops.moe.products.gluon_sm90.consumer import sigmoid, store
from flashmoe_science.ops.moe.products.mxfp4_sm90.memory import CHUNKS
from flashmoe_science.ops.moe.products.mxfp4_sm90.operand import (
    BLOCK,
    BYTES,
    BYTES_64,
    GROUP,
    PAIR,
    SCALES,
    SCALES_64,
    STEP,
    chunks,
    upcast,
)
from flashmoe_science.ops.moe.products.stream_k import Segment, collect, leave
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, receive

_activated = as_gluon(activated)
QUADS = gl.constexpr(STEP.value // GROUP.value)  # groups of a step


@gluon.jit
def _rows_of(
    segment, ROWS: gl.constexpr, CONSUMER: gl.constexpr, ALL: gl.constexpr, COLUMN: gl.constexpr, UP: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The rows of an expert's weights that a consumer has, the last one for those past the end: no one stores what they give.
    With ``COLUMN`` those of a step of the second product's K, eight gates and eight ups in turn."""
    row = gl.arange(0, ROWS, layout)
    if COLUMN is None:
        return gl.minimum(segment.column * BLOCK + CONSUMER * ROWS + row, ALL - 1)
    else:
        # A quarter of the rows is of each 32 columns: eight or sixteen that follow each other.
        QUARTER: gl.constexpr = ROWS // 4
        inside = row % QUARTER
        column = segment.column * STEP + row // QUARTER * 32 + CONSUMER * (QUARTER // 2) + inside // 16 * 8 + row % 8
        return gl.minimum(column * COLUMN + inside // 8 % 2 * UP, ALL - 1)


@gluon.jit
def _scales_at(scales, rows, step, DEPTH: gl.constexpr, layout: gl.constexpr):
    """The e8m0 scales [rows, 4] of a step, int32. Past the end of a row the last one's, for weights that are 0. A row's first
    brings the 128 bytes around it to L2. Of ``gl.load`` four would be packed in a register, which waits for them."""
    group = gl.minimum(step * QUADS + gl.arange(0, QUADS, gl.SliceLayout(0, layout)), DEPTH // GROUP - 1)
    pointers = scales + (rows + gl.expand_dims(group, 0))
    return gl.inline_asm_elementwise("ld.global.L2::128B.u8 $0, [$1];", "=r,l", [pointers], gl.int32, True, 1)


@gluon.jit
def _multiply_stage(acc, stage, phase, memory, scales, CONSUMER: gl.constexpr):
    """The sums with those of a stage, whose second chunk may not be multiplied yet."""
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    ROWS: gl.constexpr = acc.shape[0]
    layout: gl.constexpr = BYTES if ROWS == 128 else BYTES_64
    mbarrier.wait(memory.full.index(stage), phase)
    codes = memory.w.index(BLOCK // ROWS * stage + CONSUMER).reshape([ROWS, QUADS, STEP // 2 // QUADS]).load(layout)
    one, two = chunks(codes)
    tokens = memory.a.index(CHUNKS * stage).permute((1, 0))
    acc = warpgroup_mma(upcast(one, scales, operand), tokens, acc, is_async=True)
    acc = warpgroup_mma_wait(1, (acc,))
    tokens = memory.a.index(CHUNKS * stage + 1).permute((1, 0))
    acc = warpgroup_mma(upcast(two, scales, operand), tokens, acc, is_async=True)
    return warpgroup_mma_wait(1, (acc,))


@gluon.jit
def multiply(acc, state, memory, scales, rows, segment, CONSUMER: gl.constexpr, DEPTH: gl.constexpr):
    """The sums of a segment's pairs of steps. ``scales``: the expert's, ``rows``: where those of each row begin."""
    STAGES: gl.constexpr = memory.w.shape[0] // memory.out.shape[0]
    layout: gl.constexpr = SCALES if acc.shape[0] == 128 else SCALES_64
    one = _scales_at(scales, rows, PAIR * segment.first, DEPTH, layout)
    two = _scales_at(scales, rows, PAIR * segment.first + 1, DEPTH, layout)
    for pair in range(segment.first, segment.stop):
        before = state
        acc = _multiply_stage(acc, before.stage, before.phase, memory, one, CONSUMER)
        one = _scales_at(scales, rows, PAIR * pair + 2, DEPTH, layout)
        state = advance(before, STAGES)
        acc = _multiply_stage(acc, state.stage, state.phase, memory, two, CONSUMER)
        two = _scales_at(scales, rows, PAIR * pair + 3, DEPTH, layout)
        mbarrier.arrive(memory.empty.index(before.stage))
        acc = warpgroup_mma_wait(0, (acc,))  # in flight across the loop's end, the assembler makes them wait for each other
        mbarrier.arrive(memory.empty.index(state.stage))
        state = advance(state, STAGES)
    return acc, state


@gluon.jit
def _activate(acc, column, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, WIDTH: gl.constexpr):
    """The activation of products whose rows are gates and ups in turn, eight and eight, as tokens [TOKENS, rows / 2] of the
    second product: their places are those of its operand (``operand.py``), and columns from ``WIDTH`` on are 0."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    gate, up = acc.reshape([ROWS // 16, 2, 8, TOKENS]).permute(0, 2, 3, 1).split()  # [ROWS / 16, 8, TOKENS]
    if FUNCTION == "silu":
        active = gate * sigmoid(gate) * up
    else:
        active = _activated(gate, up, FUNCTION, True, ALPHA, LIMIT)
    B: gl.constexpr = ROWS // 64
    if WIDTH % STEP != 0:
        layout: gl.constexpr = active.type.layout
        block = gl.arange(0, ROWS // 16, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        block = gl.expand_dims(gl.expand_dims(block, 1), 2)
        active = gl.where(column + block // B * GROUP < WIDTH, active, 0.0)
    active = active.reshape([QUADS, B, 2, 2, 2, TOKENS])  # [q, b, u, j, t, TOKENS]
    return active.permute(5, 1, 3, 4, 0, 2).reshape([TOKENS, ROWS // 2])


@gluon.jit
def consume(
    scales, bias, out_desc, partial, flags, memory,
    CONSUMER: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr,
    COLUMN: gl.constexpr, UP: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """The rows of weights of one consumer in every segment of this program; the strides are the scales'. Without ``FUNCTION``
    products are stored as they are; with it the rows of column c are c * ``COLUMN``, its gate, and ``UP`` rows further, its
    up."""
    ALL: gl.constexpr = WIDTH if FUNCTION is None else 2 * WIDTH  # rows of an expert
    PAIRS: gl.constexpr = (DEPTH + PAIR * STEP - 1) // (PAIR * STEP)
    TOKENS: gl.constexpr = memory.a.shape[1]
    ROWS: gl.constexpr = BLOCK // memory.out.shape[0]
    of_scales: gl.constexpr = gl.SliceLayout(1, SCALES if ROWS == 128 else SCALES_64)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    state = first_stage()
    iteration = gl.to_tensor(0)
    buffers = (memory.out.index(CONSUMER),)
    segment = Segment(*receive(memory.mailbox, iteration, one))
    while segment.column >= 0:
        iteration += 1
        rows = _rows_of(segment, ROWS, CONSUMER, ALL, COLUMN, UP, of_scales)
        rows = gl.expand_dims(rows * STRIDE_N, 1)
        acc = gl.zeros([ROWS, TOKENS], gl.float32, layout)
        if bias is not None:
            of_bias = _rows_of(segment, ROWS, CONSUMER, ALL, COLUMN, UP, gl.SliceLayout(1, layout))
            biases = gl.load(bias + segment.expert.to(gl.int64) * ALL + of_bias).to(gl.float32)
            acc += gl.expand_dims(gl.where(segment.stop == PAIRS, biases, 0.0), 1)
        of_expert = scales + segment.expert.to(gl.int64) * STRIDE_E
        acc, state = multiply(acc, state, memory, of_expert, rows, segment, CONSUMER, DEPTH)
        if segment.stop < PAIRS:
            leave(acc, partial, flags, segment.program, CONSUMER, BLOCK // ROWS, TOKENS)
        else:
            acc = collect(acc, partial, flags, segment.program, CONSUMER, BLOCK // ROWS, TOKENS)
            if FUNCTION is None:
                column = segment.column * BLOCK + CONSUMER * ROWS
                store(acc.permute((1, 0)), out_desc, segment.row, segment.end, column, buffers, 0)
            else:
                active = _activate(acc, segment.column * STEP, FUNCTION, ALPHA, LIMIT, WIDTH)
                column = segment.column * STEP + CONSUMER * (ROWS // 2)
                store(active, out_desc, segment.row, segment.end, column, buffers, 0)
        segment = Segment(*receive(memory.mailbox, iteration, one))
    tma.store_wait(0)
