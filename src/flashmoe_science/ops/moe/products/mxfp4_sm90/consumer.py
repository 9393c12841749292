"""A consumer of the two kernels: it multiplies 64 or 128 rows of weights by tokens; its epilogue activates and stores.

Weights are the rows of a product and tokens its columns: few tokens then leave no rows of the matrix instruction empty.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flashmoe_science.ops.gluon_bridge import as_gluon
from flashmoe_science.ops.moe.activation import activated
from flashmoe_science.ops.moe.products.gluon_sm90.consumer import halves, sigmoid, store
from flashmoe_science.ops.moe.products.mxfp4_sm90.memory import CHUNKS
from flashmoe_science.ops.moe.products.mxfp4_sm90.operand import (
    APART,
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
NARROW = gl.constexpr(64)  # tokens: an expert's last tile of 256 that has no more is multiplied as a tile of so many
QUADS = gl.constexpr(STEP.value // GROUP.value)  # groups of a step


@gluon.jit
def _rows_of(
    block, part, ROWS: gl.constexpr, ALL: gl.constexpr, COLUMN: gl.constexpr, UP: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The rows of an expert's weights in a part of a block, the last one for those past the end: no one stores what they give.
    With ``COLUMN`` those of a step of the second product's K, eight gates and eight ups in turn."""
    row = gl.arange(0, ROWS, layout)
    if COLUMN is None:
        return gl.minimum(block * BLOCK + part * ROWS + row, ALL - 1)
    else:
        # A quarter of the rows is of each 32 columns: eight or sixteen that follow each other.
        QUARTER: gl.constexpr = ROWS // 4
        inside = row % QUARTER
        column = block * STEP + row // QUARTER * 32 + part * (QUARTER // 2) + inside // 16 * 8 + row % 8
        return gl.minimum(column * COLUMN + inside // 8 % 2 * UP, ALL - 1)


@gluon.jit
def _quads_of(layout: gl.constexpr):
    """0 to 3, [1, 4], by an instruction that stays here: else what follows of them takes registers of all warps."""
    quads = gl.expand_dims(gl.arange(0, QUADS, gl.SliceLayout(0, layout)), 0)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [quads], gl.int32, False, 1)


@gluon.jit
def _load_scales(scales, rows, quads, step, PAIRED: gl.constexpr, DEPTH: gl.constexpr):
    """The e8m0 scales [rows, 4] of a step, int32. ``PAIRED``: those of its pair, two of a row's eight to a thread. Past the
    end of a row others of it, for weights that are 0. A row's first brings the 128 bytes around it to L2. Of
    ``gl.load`` values would be packed in a register, which waits for them."""
    if PAIRED:
        pointers = scales + (rows + gl.minimum(PAIR * (step // PAIR * QUADS + quads), DEPTH // GROUP - PAIR))
        return gl.inline_asm_elementwise("ld.global.L2::128B.u16 $0, [$1];", "=r,l", [pointers], gl.int32, True, 1)
    else:
        pointers = scales + (rows + gl.minimum(step * QUADS + quads, DEPTH // GROUP - 1))
        return gl.inline_asm_elementwise("ld.global.L2::128B.u8 $0, [$1];", "=r,l", [pointers], gl.int32, True, 1)


@gluon.jit
def _scales_of(loaded, quads, step, PAIRED: gl.constexpr, layout: gl.constexpr):
    """The scales [rows, 4] of a step, from the threads that have them if ``PAIRED``."""
    if PAIRED:
        source = (step & 1) * 2 + quads // 2
        loaded = gl.gather(loaded, gl.zeros(loaded.shape, gl.int32, layout) + source, 1) >> quads % 2 * 8 & 255
    return loaded


@gluon.jit
def _codes_of(memory, stage, ROWS: gl.constexpr, CONSUMER: gl.constexpr):
    """A consumer's bytes of a stage, [rows, 4, 16]."""
    layout: gl.constexpr = BYTES if ROWS == 128 else BYTES_64
    return memory.w.index(memory.out.shape[0] * stage + CONSUMER).reshape([ROWS, QUADS, STEP // 2 // QUADS]).load(layout)


@gluon.jit
def _tokens_of(memory, stage, NTH: gl.constexpr, TOKENS: gl.constexpr):
    """The first tokens of the ``NTH`` chunk of a stage, [CHUNK, TOKENS]."""
    return memory.a.index(CHUNKS * stage + NTH).slice(0, TOKENS, 0).permute((1, 0))


@gluon.jit
def _multiply_stage(acc, stage, phase, memory, scales, before, CONSUMER: gl.constexpr):
    """The sums with those of a stage, whose second chunk may not be multiplied yet. A stage ``before`` is released when its
    own second chunk has been."""
    TOKENS: gl.constexpr = acc.shape[1]
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    mbarrier.wait(memory.full.index(stage), phase)
    one, two = chunks(_codes_of(memory, stage, acc.shape[0], CONSUMER))
    acc = warpgroup_mma(upcast(one, scales, operand), _tokens_of(memory, stage, 0, TOKENS), acc, is_async=True)
    acc = warpgroup_mma_wait(1, (acc,))
    if before is not None:
        mbarrier.arrive(memory.empty.index(before))
    acc = warpgroup_mma(upcast(two, scales, operand), _tokens_of(memory, stage, 1, TOKENS), acc, is_async=True)
    return warpgroup_mma_wait(1, (acc,))


@gluon.jit
def _multiply_together(
    acc, state, memory, scales, rows, segment, PAIRED: gl.constexpr, CONSUMER: gl.constexpr, DEPTH: gl.constexpr
):  # fmt: skip
    """``multiply`` by warpgroups; a pair of steps is a unit of work."""
    STAGES: gl.constexpr = memory.w.shape[0] // memory.out.shape[0]
    layout: gl.constexpr = SCALES if acc.shape[0] == 128 else SCALES_64
    EARLY: gl.constexpr = memory.a.shape[1] > 128  # tokens whose stages are few
    quads = _quads_of(layout)
    one = _load_scales(scales, rows, quads, PAIR * segment.first, PAIRED, DEPTH)
    two = one if PAIRED else _load_scales(scales, rows, quads, PAIR * segment.first + 1, PAIRED, DEPTH)
    for pair in range(segment.first, segment.stop):
        before = state
        given = _scales_of(one, quads, 0, PAIRED, layout)
        acc = _multiply_stage(acc, before.stage, before.phase, memory, given, None, CONSUMER)
        given = _scales_of(two, quads, 1, PAIRED, layout)
        one = _load_scales(scales, rows, quads, PAIR * pair + 2, PAIRED, DEPTH)
        state = advance(before, STAGES)
        acc = _multiply_stage(acc, state.stage, state.phase, memory, given, before.stage if EARLY else None, CONSUMER)
        two = one if PAIRED else _load_scales(scales, rows, quads, PAIR * pair + 3, PAIRED, DEPTH)
        if not EARLY:
            mbarrier.arrive(memory.empty.index(before.stage))
        acc = warpgroup_mma_wait(0, (acc,))  # in flight across the loop's end, the assembler makes them wait for each other
        mbarrier.arrive(memory.empty.index(state.stage))
        state = advance(state, STAGES)
    return acc, state


@gluon.jit
def _multiply_apart(
    acc, state, memory, scales, rows, segment, PAIRED: gl.constexpr, CONSUMER: gl.constexpr, DEPTH: gl.constexpr
):  # fmt: skip
    """``multiply`` by warps that do not wait for each other. Of tiles of few tokens a step is a unit of work."""
    STAGES: gl.constexpr = memory.w.shape[0] // memory.out.shape[0]
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
    layout: gl.constexpr = SCALES if acc.shape[0] == 128 else SCALES_64
    TOKENS: gl.constexpr = acc.shape[1]
    quads = _quads_of(layout)
    UNIT: gl.constexpr = 1 if memory.a.shape[1] <= APART else PAIR  # steps
    loaded = _load_scales(scales, rows, quads, UNIT * segment.first, PAIRED, DEPTH)
    for step in range(UNIT * segment.first, UNIT * segment.stop):
        given = _scales_of(loaded, quads, step, PAIRED, layout)
        if (step & 1 != 0) if PAIRED else True:
            loaded = _load_scales(scales, rows, quads, step + 1, PAIRED, DEPTH)
        mbarrier.wait(memory.full.index(state.stage), state.phase)
        first, second = chunks(_codes_of(memory, state.stage, acc.shape[0], CONSUMER))
        acc = mma_v2(upcast(first, given, left), _tokens_of(memory, state.stage, 0, TOKENS).load(right), acc)
        tokens = _tokens_of(memory, state.stage, 1, TOKENS).load(right)
        mbarrier.arrive(memory.empty.index(state.stage))
        acc = mma_v2(upcast(second, given, left), tokens, acc)
        state = advance(state, STAGES)
    return acc, state


@gluon.jit
def multiply(
    acc, state, memory, scales, rows, segment, SYNC: gl.constexpr, PAIRED: gl.constexpr, CONSUMER: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    """The sums of a segment. ``scales``: the expert's, ``rows``: where those of each row begin."""
    if SYNC:
        return _multiply_apart(acc, state, memory, scales, rows, segment, PAIRED, CONSUMER, DEPTH)
    else:
        return _multiply_together(acc, state, memory, scales, rows, segment, PAIRED, CONSUMER, DEPTH)


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
def _store_tile(
    acc, out_desc, row, end, block, part, buffers,
    WIDTH: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Write the sums of a part of a block, activated with ``FUNCTION``, as many tokens at a time as a copy has."""
    ROWS: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1] // 2
    if out_desc.block_type.shape[2] <= HALF:
        left, right = halves(acc)
        _store_tile(left, out_desc, row, end, block, part, buffers, WIDTH, FUNCTION, ALPHA, LIMIT)
        _store_tile(right, out_desc, row + HALF, end, block, part, buffers, WIDTH, FUNCTION, ALPHA, LIMIT)
    elif FUNCTION is None:
        store(acc.permute((1, 0)), out_desc, row, end, block * BLOCK + part * ROWS, buffers, 0)
    else:
        active = _activate(acc, block * STEP, FUNCTION, ALPHA, LIMIT, WIDTH)
        store(active, out_desc, row, end, block * STEP + part * (ROWS // 2), buffers, 0)


@gluon.jit
def _consume_segment(
    scales, bias, out_desc, partial, flags, memory, segment, state,
    TOKENS: gl.constexpr, CONSUMER: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr, PAIRED: gl.constexpr, COLUMN: gl.constexpr, UP: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """The state of the pipeline after a segment, of whose tile the first ``TOKENS`` are multiplied."""
    ALL: gl.constexpr = WIDTH if FUNCTION is None else 2 * WIDTH  # rows of an expert
    UNIT: gl.constexpr = STEP if memory.a.shape[1] <= APART else PAIR * STEP
    UNITS: gl.constexpr = (DEPTH + UNIT - 1) // UNIT
    CONSUMERS: gl.constexpr = memory.out.shape[0]
    ROWS: gl.constexpr = memory.w.numel // memory.w.shape[0] // (STEP // 2)
    PARTS: gl.constexpr = BLOCK // ROWS
    of_scales: gl.constexpr = gl.SliceLayout(1, SCALES if ROWS == 128 else SCALES_64)
    SYNC: gl.constexpr = TOKENS <= APART or memory.a.shape[1] > TOKENS  # two loops of wgmma in a kernel would be serialised
    VERSION: gl.constexpr = [2, 0] if SYNC else [3, 0]
    INSTRUCTION: gl.constexpr = [16, 8] if SYNC else [16, TOKENS, 16]
    layout: gl.constexpr = gl.NVMMADistributedLayout(VERSION, [4, 1], INSTRUCTION)
    part = segment.column * CONSUMERS + CONSUMER
    block, part = part // PARTS, part % PARTS
    rows = _rows_of(block, part, ROWS, ALL, COLUMN, UP, of_scales)
    rows = gl.expand_dims(rows * STRIDE_N, 1)
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    if bias is not None:
        of_bias = _rows_of(block, part, ROWS, ALL, COLUMN, UP, gl.SliceLayout(1, layout))
        biases = gl.load(bias + segment.expert.to(gl.int64) * ALL + of_bias).to(gl.float32)
        acc += gl.expand_dims(gl.where(segment.stop == UNITS, biases, 0.0), 1)
    of_expert = scales + segment.expert.to(gl.int64) * STRIDE_E
    acc, state = multiply(acc, state, memory, of_expert, rows, segment, SYNC, PAIRED, CONSUMER, DEPTH)
    if segment.stop < UNITS:
        leave(acc, partial, flags, segment.program, CONSUMER, CONSUMERS, memory.a.shape[1])
    else:
        acc = collect(acc, partial, flags, segment.program, CONSUMER, CONSUMERS, memory.a.shape[1])
        buffers = (memory.out.index(CONSUMER),)
        _store_tile(acc, out_desc, segment.row, segment.end, block, part, buffers, WIDTH, FUNCTION, ALPHA, LIMIT)
    return state


@gluon.jit
def consume(
    scales, bias, out_desc, partial, flags, memory,
    CONSUMER: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr,
    PAIRED: gl.constexpr, COLUMN: gl.constexpr, UP: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """The rows of weights of one consumer in every segment of this program; the strides are the scales'. Without ``FUNCTION``
    products are stored as they are; with it the rows of column c are c * ``COLUMN``, its gate, and ``UP`` rows further, its
    up. An expert's last tile may have few of the tokens that it could."""
    TOKENS: gl.constexpr = memory.a.shape[1]
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    state = first_stage()
    iteration = gl.to_tensor(0)
    segment = Segment(*receive(memory.mailbox, iteration, one))
    while segment.column >= 0:
        iteration += 1
        if TOKENS > 128:
            if segment.end - segment.row > NARROW:
                state = _consume_segment(
                    scales, bias, out_desc, partial, flags, memory, segment, state, TOKENS, CONSUMER, DEPTH, WIDTH,
                    STRIDE_E, STRIDE_N, PAIRED, COLUMN, UP, FUNCTION, ALPHA, LIMIT,
                )  # fmt: skip
            else:
                state = _consume_segment(
                    scales, bias, out_desc, partial, flags, memory, segment, state, NARROW, CONSUMER, DEPTH, WIDTH,
                    STRIDE_E, STRIDE_N, PAIRED, COLUMN, UP, FUNCTION, ALPHA, LIMIT,
                )  # fmt: skip
        else:
            state = _consume_segment(
                scales, bias, out_desc, partial, flags, memory, segment, state, TOKENS, CONSUMER, DEPTH, WIDTH,
                STRIDE_E, STRIDE_N, PAIRED, COLUMN, UP, FUNCTION, ALPHA, LIMIT,
            )  # fmt: skip
        segment = Segment(*receive(memory.mailbox, iteration, one))
    tma.store_wait(0)
