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
from flashmoe_science.ops.moe.products.gluon_sm90.consumer import sigmoid, store
from flashmoe_science.ops.moe.products.stream_k import Segment, collect, leave
from flashmoe_science.ops.moe.products.weights_sm90 import scales as of
from flashmoe_science.ops.moe.products.weights_sm90.operand import (
    APART,
    BYTES_64,
    BYTES_128,
    BYTES_OF_STAGE,
    OF_SCALES,
    OF_SCALES_64,
    PAIR,
    QUADS,
    STEP,
    chunks,
    chunks_of,
    span_of,
    upcast,
)
from flashmoe_science.ops.moe.products.weights_sm90.scales import Places, given_of, load_scales, load_zeros, quads_of
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, receive

_activated = as_gluon(activated)


@gluon.jit
def _rows_of(
    block, part, ROWS: gl.constexpr, SPAN: gl.constexpr, ALL: gl.constexpr, COLUMN: gl.constexpr, UP: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The rows of an expert's weights in a part of a block, the last one for those past the end: no one stores what they give.
    With ``COLUMN`` those of a stage of the second product's K, eight gates and eight ups in turn."""
    row = gl.arange(0, ROWS, layout)
    if COLUMN is None:
        return gl.minimum(block * (8 * SPAN) + part * ROWS + row, ALL - 1)
    else:
        # A quarter of the rows is of each thread's columns: eight or sixteen that follow each other.
        QUARTER: gl.constexpr = ROWS // 4
        inside = row % QUARTER
        column = block * (4 * SPAN) + row // QUARTER * SPAN + part * (QUARTER // 2) + inside // 16 * 8 + row % 8
        return gl.minimum(column * COLUMN + inside // 8 % 2 * UP, ALL - 1)


@gluon.jit
def _places_of(
    scales, zeros, expert, block, part, ROWS: gl.constexpr, SCALES: gl.constexpr, COLUMN: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Where the scales and zero points of an expert's rows in a part of a block are."""
    SPAN: gl.constexpr = span_of(SCALES[of.FORMAT])
    ALL: gl.constexpr = SCALES[of.ALL]
    UP: gl.constexpr = SCALES[of.UP]
    rows = _rows_of(block, part, ROWS, SPAN, ALL, COLUMN, UP, layout)
    if SCALES[of.HIGH] > 1:
        rows = rows // SCALES[of.HIGH]
    first = scales + expert.to(gl.int64) * SCALES[of.OF_EXPERT]
    of_rows = gl.expand_dims(rows * SCALES[of.OF_ROW], 1)
    if SCALES[of.ZEROS_OF_ROW] == 0:
        return Places(first, of_rows, first, of_rows, of_rows)
    else:
        of_zeros = gl.expand_dims(rows // 8 * SCALES[of.ZEROS_OF_ROW] + rows % 8 // 2, 1)
        zeros += expert.to(gl.int64) * SCALES[of.ZEROS]
        return Places(first, of_rows, zeros, of_zeros, gl.expand_dims(rows % 2 * 4, 1))


@gluon.jit
def _codes_of(memory, stage, ROWS: gl.constexpr, CONSUMER: gl.constexpr):
    """A consumer's bytes of a stage, [rows, 4, 16]."""
    layout: gl.constexpr = BYTES_128 if ROWS == 128 else BYTES_64
    return memory.w.index(memory.out.shape[0] * stage + CONSUMER).reshape([ROWS, QUADS, BYTES_OF_STAGE // QUADS]).load(layout)


@gluon.jit
def _tokens_of(memory, stage, NTH: gl.constexpr, TOKENS: gl.constexpr, CHUNKS: gl.constexpr):
    """The first tokens of the ``NTH`` chunk of a stage, [CHUNK, TOKENS]."""
    return memory.a.index(CHUNKS * stage + NTH).slice(0, TOKENS, 0).permute((1, 0))


@gluon.jit
def _multiply_stage(acc, stage, phase, memory, given, before, FORMAT: gl.constexpr, CONSUMER: gl.constexpr):
    """The sums with those of a stage, whose last chunk may not be multiplied yet. A stage ``before`` is released when its own
    last chunk has been."""
    TOKENS: gl.constexpr = acc.shape[1]
    CHUNKS: gl.constexpr = chunks_of(FORMAT)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    mbarrier.wait(memory.full.index(stage), phase)
    codes = _codes_of(memory, stage, acc.shape[0], CONSUMER)
    if CHUNKS == 2:
        one, two = chunks(codes)
    else:
        one = codes
    weights = upcast(one, given, FORMAT, operand)
    acc = warpgroup_mma(weights, _tokens_of(memory, stage, 0, TOKENS, CHUNKS), acc, is_async=True)
    acc = warpgroup_mma_wait(1, (acc,))
    if before is not None:
        mbarrier.arrive(memory.empty.index(before))
    if CHUNKS == 2:
        weights = upcast(two, given, FORMAT, operand)
        acc = warpgroup_mma(weights, _tokens_of(memory, stage, 1, TOKENS, CHUNKS), acc, is_async=True)
        acc = warpgroup_mma_wait(1, (acc,))
    return acc


@gluon.jit
def _multiply_together(acc, state, memory, places, segment, SCALES: gl.constexpr, CONSUMER: gl.constexpr):
    """``multiply`` by warpgroups; a pair of steps is a unit of work."""
    STAGES: gl.constexpr = memory.w.shape[0] // memory.out.shape[0]
    FORMAT: gl.constexpr = SCALES[of.FORMAT]
    layout: gl.constexpr = OF_SCALES if acc.shape[0] == 128 else OF_SCALES_64
    TWICE: gl.constexpr = chunks_of(FORMAT) == 1  # stages a step
    ZEROS: gl.constexpr = SCALES[of.ZEROS_OF_ROW] > 0
    PAIRED: gl.constexpr = SCALES[of.PAIRED]
    quads = quads_of(layout)
    one = load_scales(places, quads, PAIR * segment.first, SCALES)
    two = one if PAIRED else load_scales(places, quads, PAIR * segment.first + 1, SCALES)
    zero_one, zero_two = one, two  # where there are none, of no use
    if ZEROS:
        zero_one = load_zeros(places, quads, PAIR * segment.first, SCALES)
        zero_two = load_zeros(places, quads, PAIR * segment.first + 1, SCALES)
    for pair in range(segment.first, segment.stop):
        before = state
        given = given_of(one, zero_one, places, quads, 0, SCALES, layout)
        acc = _multiply_stage(acc, before.stage, before.phase, memory, given, None, FORMAT, CONSUMER)
        if TWICE:
            state = advance(before, STAGES)
            acc = _multiply_stage(acc, state.stage, state.phase, memory, given, before.stage, FORMAT, CONSUMER)
            before = state
        given = given_of(two, zero_two, places, quads, 1, SCALES, layout)
        one = load_scales(places, quads, PAIR * pair + 2, SCALES)
        if ZEROS:
            zero_one = load_zeros(places, quads, PAIR * pair + 2, SCALES)
        state = advance(before, STAGES)
        released = before.stage if TWICE else None
        acc = _multiply_stage(acc, state.stage, state.phase, memory, given, released, FORMAT, CONSUMER)
        if TWICE:
            before = state
            state = advance(before, STAGES)
            acc = _multiply_stage(acc, state.stage, state.phase, memory, given, before.stage, FORMAT, CONSUMER)
        two = one if PAIRED else load_scales(places, quads, PAIR * pair + 3, SCALES)
        if ZEROS:
            zero_two = load_zeros(places, quads, PAIR * pair + 3, SCALES)
        if not TWICE:
            mbarrier.arrive(memory.empty.index(before.stage))
        acc = warpgroup_mma_wait(0, (acc,))  # in flight across the loop's end, the assembler makes them wait for each other
        mbarrier.arrive(memory.empty.index(state.stage))
        state = advance(state, STAGES)
    return acc, state


@gluon.jit
def _multiply_stage_apart(acc, state, memory, given, FORMAT: gl.constexpr, CONSUMER: gl.constexpr):
    """The sums with those of a stage, which is released."""
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
    TOKENS: gl.constexpr = acc.shape[1]
    CHUNKS: gl.constexpr = chunks_of(FORMAT)
    mbarrier.wait(memory.full.index(state.stage), state.phase)
    codes = _codes_of(memory, state.stage, acc.shape[0], CONSUMER)
    if CHUNKS == 2:
        first, codes = chunks(codes)
        weights = upcast(first, given, FORMAT, left)
        acc = mma_v2(weights, _tokens_of(memory, state.stage, 0, TOKENS, CHUNKS).load(right), acc)
    tokens = _tokens_of(memory, state.stage, CHUNKS - 1, TOKENS, CHUNKS).load(right)
    mbarrier.arrive(memory.empty.index(state.stage))
    return mma_v2(upcast(codes, given, FORMAT, left), tokens, acc)


@gluon.jit
def _multiply_apart(acc, state, memory, places, segment, SCALES: gl.constexpr, CONSUMER: gl.constexpr):
    """``multiply`` by warps that do not wait for each other; a step is a unit of work."""
    STAGES: gl.constexpr = memory.w.shape[0] // memory.out.shape[0]
    FORMAT: gl.constexpr = SCALES[of.FORMAT]
    layout: gl.constexpr = OF_SCALES if acc.shape[0] == 128 else OF_SCALES_64
    ZEROS: gl.constexpr = SCALES[of.ZEROS_OF_ROW] > 0
    quads = quads_of(layout)
    loaded = load_scales(places, quads, segment.first, SCALES)
    zeros = loaded  # where there are none, of no use
    if ZEROS:
        zeros = load_zeros(places, quads, segment.first, SCALES)
    for step in range(segment.first, segment.stop):
        given = given_of(loaded, zeros, places, quads, step, SCALES, layout)
        if (step & 1 != 0) if SCALES[of.PAIRED] else True:
            loaded = load_scales(places, quads, step + 1, SCALES)
        if ZEROS:
            zeros = load_zeros(places, quads, step + 1, SCALES)
        for _ in gl.static_range(PAIR // chunks_of(FORMAT)):  # the stages of a step
            acc = _multiply_stage_apart(acc, state, memory, given, FORMAT, CONSUMER)
            state = advance(state, STAGES)
    return acc, state


@gluon.jit
def multiply(acc, state, memory, places, segment, SYNC: gl.constexpr, SCALES: gl.constexpr, CONSUMER: gl.constexpr):
    """The sums of a segment."""
    if SYNC:
        return _multiply_apart(acc, state, memory, places, segment, SCALES, CONSUMER)
    else:
        return _multiply_together(acc, state, memory, places, segment, SCALES, CONSUMER)


@gluon.jit
def _activate(
    acc, column, SPAN: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
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
        active = gl.where(column + block // B * SPAN < WIDTH, active, 0.0)
    if SPAN == 32:
        active = active.reshape([QUADS, B, 2, 2, 2, TOKENS]).permute(5, 1, 3, 4, 0, 2)  # [q, b, u, j, t, TOKENS]
    else:
        active = active.reshape([QUADS, B, 2, 2, 2, TOKENS]).permute(5, 1, 2, 4, 0, 3)  # [q, 2 of w twice, u, j, TOKENS]
    return active.reshape([TOKENS, ROWS // 2])


@gluon.jit
def _store_tile(
    acc, out_desc, row, end, block, part, buffers,
    SPAN: gl.constexpr, WIDTH: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Write the sums of a part of a block, activated with ``FUNCTION``."""
    ROWS: gl.constexpr = acc.shape[0]
    if FUNCTION is None:
        store(acc.permute((1, 0)), out_desc, row, end, block * (8 * SPAN) + part * ROWS, buffers, 0)
    else:
        active = _activate(acc, block * (4 * SPAN), SPAN, FUNCTION, ALPHA, LIMIT, WIDTH)
        store(active, out_desc, row, end, block * (4 * SPAN) + part * (ROWS // 2), buffers, 0)


@gluon.jit
def _consume_segment(
    scales, zeros, bias, out_desc, partial, flags, memory, segment, state,
    CONSUMER: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, SCALES: gl.constexpr,
    COLUMN: gl.constexpr, UP: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """The state of the pipeline after a segment."""
    TOKENS: gl.constexpr = memory.a.shape[1]
    ALL: gl.constexpr = WIDTH if FUNCTION is None else 2 * WIDTH  # rows of an expert
    SYNC: gl.constexpr = TOKENS <= APART
    UNIT: gl.constexpr = STEP if SYNC else PAIR * STEP
    UNITS: gl.constexpr = (DEPTH + UNIT - 1) // UNIT
    CONSUMERS: gl.constexpr = memory.out.shape[0]
    ROWS: gl.constexpr = memory.w.numel // memory.w.shape[0] // BYTES_OF_STAGE
    SPAN: gl.constexpr = span_of(SCALES[of.FORMAT])
    PARTS: gl.constexpr = 8 * SPAN // ROWS
    of_scales: gl.constexpr = gl.SliceLayout(1, OF_SCALES if ROWS == 128 else OF_SCALES_64)
    VERSION: gl.constexpr = [2, 0] if SYNC else [3, 0]
    INSTRUCTION: gl.constexpr = [16, 8] if SYNC else [16, TOKENS, 16]
    layout: gl.constexpr = gl.NVMMADistributedLayout(VERSION, [4, 1], INSTRUCTION)
    part = segment.column * CONSUMERS + CONSUMER
    block, part = part // PARTS, part % PARTS
    places = _places_of(scales, zeros, segment.expert, block, part, ROWS, SCALES, COLUMN, of_scales)
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    if bias is not None:
        of_bias = _rows_of(block, part, ROWS, SPAN, ALL, COLUMN, UP, gl.SliceLayout(1, layout))
        biases = gl.load(bias + segment.expert.to(gl.int64) * ALL + of_bias).to(gl.float32)
        acc += gl.expand_dims(gl.where(segment.stop == UNITS, biases, 0.0), 1)
    acc, state = multiply(acc, state, memory, places, segment, SYNC, SCALES, CONSUMER)
    if segment.stop < UNITS:
        leave(acc, partial, flags, segment.program, CONSUMER, CONSUMERS, TOKENS)
    else:
        acc = collect(acc, partial, flags, segment.program, CONSUMER, CONSUMERS, TOKENS)
        buffers = (memory.out.index(CONSUMER),)
        _store_tile(acc, out_desc, segment.row, segment.end, block, part, buffers, SPAN, WIDTH, FUNCTION, ALPHA, LIMIT)
    return state


@gluon.jit
def consume(
    scales, zeros, bias, out_desc, partial, flags, memory,
    CONSUMER: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, SCALES: gl.constexpr,
    COLUMN: gl.constexpr, UP: gl.constexpr, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """The rows of weights of one consumer in every segment of this program. Without ``FUNCTION`` products are stored as they
    are; with it the rows of column c are c * ``COLUMN``, its gate, and ``UP`` rows further, its up."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    state = first_stage()
    iteration = gl.to_tensor(0)
    segment = Segment(*receive(memory.mailbox, iteration, one))
    while segment.column >= 0:
        iteration += 1
        state = _consume_segment(
            scales, zeros, bias, out_desc, partial, flags, memory, segment, state, CONSUMER, DEPTH, WIDTH,
            SCALES, COLUMN, UP, FUNCTION, ALPHA, LIMIT,
        )  # fmt: skip
        segment = Segment(*receive(memory.mailbox, iteration, one))
    tma.store_wait(0)
