"""A consumer of the two kernels: it multiplies 128 rows of weights by tokens; its epilogue quantises or stores.

Weights are the rows of a product and tokens its columns: few tokens then leave no rows of the matrix instruction empty. The
sums of a step are made anew, as the instruction keeps some 14 bits of them, and times their scales added to fp32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flashmoe_science.ops.gluon_bridge import as_gluon
from flashmoe_science.ops.moe.activation import activated
from flashmoe_science.ops.moe.products.codes import LARGEST, in_e4m3, power
from flashmoe_science.ops.moe.products.fp8_sm90.memory import BLOCK, CONSUMERS, STEP
from flashmoe_science.ops.moe.products.fp8_sm90.quantize import LEAST
from flashmoe_science.ops.moe.products.gluon_sm90.consumer import sigmoid, store
from flashmoe_science.ops.moe.products.stream_k import Segment, collect, leave
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, receive

_activated, _in_e4m3, _power = as_gluon(activated), as_gluon(in_e4m3), as_gluon(power)
HALF = gl.constexpr(64)  # rows of one matrix instruction
_BOTH = gl.constexpr(64)  # tokens up to which there are registers for the fresh sums of both halves


@gluon.jit
def _scale_at(scales, step, STEPS: gl.constexpr, STRIDE_K: gl.constexpr):
    """The scale of a step's block, fp32; past the end the last one's."""
    found = gl.load(scales + gl.minimum(step, STEPS - 1) * STRIDE_K)
    return _power(found) if scales.dtype.element_ty == gl.uint8 else found


@gluon.jit
def multiply(
    one, two, state, memory, of_one, of_two, segment, CONSUMER: gl.constexpr, STEPS: gl.constexpr, STRIDE_K: gl.constexpr
):  # fmt: skip
    """The sums of both halves with those of a segment's steps; ``of_one`` and ``of_two``: where the scales of each begin. Of
    channels, without ``STRIDE_K``, they are not read."""
    BLOCKS: gl.constexpr = STRIDE_K is not None
    STAGES: gl.constexpr = memory.a.shape[0]
    TOKENS: gl.constexpr = one.shape[1]
    layout: gl.constexpr = one.type.layout
    fresh = gl.zeros([HALF, TOKENS], gl.float32, layout)
    other = gl.zeros([HALF, TOKENS], gl.float32, layout)
    first, second = 1.0, 1.0
    if BLOCKS:
        first = _scale_at(of_one, segment.first, STEPS, STRIDE_K)
        second = _scale_at(of_two, segment.first, STEPS, STRIDE_K)
    for step in range(segment.first, segment.stop):
        if BLOCKS:
            after_first = _scale_at(of_one, step + 1, STEPS, STRIDE_K)
            after_second = _scale_at(of_two, step + 1, STEPS, STRIDE_K)
        mbarrier.wait(memory.full.index(state.stage), state.phase)
        w = memory.w.index(CONSUMERS * state.stage + CONSUMER).reshape([2 * HALF, STEP])
        a = memory.a.index(state.stage).slice(0, TOKENS, 0).permute((1, 0))
        scales = memory.of_a.index(state.stage).slice(0, TOKENS, 0)
        fresh = warpgroup_mma(w.slice(0, HALF, 0), a, fresh, use_acc=False, is_async=True)
        if TOKENS <= _BOTH:
            other = warpgroup_mma(w.slice(HALF, HALF, 0), a, other, use_acc=False, is_async=True)
        of_a = scales.load(gl.SliceLayout(0, layout))  # [TOKENS]
        if TOKENS <= _BOTH:
            fresh = warpgroup_mma_wait(1, (fresh,))
            one += fresh * gl.expand_dims(first * of_a, 0)
            other = warpgroup_mma_wait(0, (other,))
            mbarrier.arrive(memory.empty.index(state.stage))
            two += other * gl.expand_dims(second * of_a, 0)
        else:
            fresh = warpgroup_mma_wait(0, (fresh,))
            one += fresh * gl.expand_dims(first * of_a, 0)
            fresh = warpgroup_mma(w.slice(HALF, HALF, 0), a, fresh, use_acc=False, is_async=True)
            of_a = scales.load(gl.SliceLayout(0, layout))  # again: there are no registers to keep it
            fresh = warpgroup_mma_wait(0, (fresh,))
            mbarrier.arrive(memory.empty.index(state.stage))
            two += fresh * gl.expand_dims(second * of_a, 0)
        if BLOCKS:
            first = after_first
            second = after_second
        state = advance(state, STAGES)
    return one, two, state


@gluon.jit
def _activate(gate, up, FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr):
    if FUNCTION == "silu":
        return gate * sigmoid(gate) * up
    else:
        return _activated(gate, up, FUNCTION, True, ALPHA, LIMIT)


@gluon.jit
def _quantize_by(active, scale):
    """What becomes codes by a static scale, and the scales of its tokens."""
    layout: gl.constexpr = gl.SliceLayout(0, active.type.layout)
    return _in_e4m3(active * (1.0 / scale)), gl.full([active.shape[1]], 0.0, gl.float32, layout) + scale


@gluon.jit
def _quantize(active, memory, meeting, CONSUMER: gl.constexpr):
    """Codes of 64 columns [64, TOKENS] and the scales of their tokens, which the other consumer's 64 columns share."""
    TOKENS: gl.constexpr = active.shape[1]
    own = gl.max(gl.abs(active), 0)  # [TOKENS]
    slot = CONSUMERS * (meeting % 2)
    memory.largest.index(slot + CONSUMER).slice(0, TOKENS, 0).store(own)
    mbarrier.arrive(memory.met.index(0))
    mbarrier.wait(memory.met.index(0), meeting % 2)
    largest = gl.maximum(own, memory.largest.index(slot + 1 - CONSUMER).slice(0, TOKENS, 0).load(own.type.layout))
    scale = gl.maximum(largest * (1.0 / LARGEST), LEAST)
    return active * gl.expand_dims(1.0 / scale, 0), scale


@gluon.jit
def _first_row(segment, CONSUMER: gl.constexpr, FUNCTION: gl.constexpr):
    """Of a consumer's first half, among gates where there is a ``FUNCTION``."""
    if FUNCTION is None:
        return segment.column * BLOCK + CONSUMER * (2 * HALF)
    else:
        return segment.column * STEP + CONSUMER * HALF


@gluon.jit
def _tile(
    scales, out_desc, out_scales, input_scale, partial, flags, memory, pairs, segment, state, meeting, TOKENS: gl.constexpr,
    CONSUMER: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr, STRIDE_K: gl.constexpr, UPS: gl.constexpr, STRIDE_S: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """One consumer's rows of a segment, whose tile has at most ``TOKENS`` tokens."""
    STEPS: gl.constexpr = (DEPTH + STEP - 1) // STEP
    MOST: gl.constexpr = memory.a.shape[1]
    PARTS: gl.constexpr = BLOCK // HALF
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    buffers = (memory.out.index(CONSUMER),)
    block = segment.column if FUNCTION is not None else CONSUMERS * segment.column + CONSUMER
    of_one = scales + segment.expert.to(gl.int64) * STRIDE_E + gl.minimum(block, (WIDTH - 1) // STEP) * STRIDE_N
    one = gl.zeros([HALF, TOKENS], gl.float32, layout)
    two = gl.zeros([HALF, TOKENS], gl.float32, layout)
    one, two, state = multiply(one, two, state, memory, of_one, of_one + UPS, segment, CONSUMER, STEPS, STRIDE_K)
    if segment.stop < STEPS:
        leave(one, partial, flags, segment.program, 2 * CONSUMER, PARTS, MOST)
        leave(two, partial, flags, segment.program, 2 * CONSUMER + 1, PARTS, MOST)
    else:
        one = collect(one, partial, flags, segment.program, 2 * CONSUMER, PARTS, MOST)
        two = collect(two, partial, flags, segment.program, 2 * CONSUMER + 1, PARTS, MOST)
        if STRIDE_K is None:
            rows = _first_row(segment, CONSUMER, FUNCTION) + gl.arange(0, HALF, gl.SliceLayout(1, layout))  # [HALF]
            of_rows = scales + segment.expert.to(gl.int64) * STRIDE_E
            one *= gl.expand_dims(gl.load(of_rows + gl.minimum(rows, WIDTH - 1) * STRIDE_N).to(gl.float32), 1)
            rows = rows if FUNCTION is not None else rows + HALF
            two *= gl.expand_dims(gl.load(of_rows + UPS + gl.minimum(rows, WIDTH - 1) * STRIDE_N).to(gl.float32), 1)
        if FUNCTION is None:
            column = _first_row(segment, CONSUMER, FUNCTION)
            store(one.permute((1, 0)), out_desc, segment.row, segment.end, column, buffers, 0)
            store(two.permute((1, 0)), out_desc, segment.row, segment.end, column + HALF, buffers, 0)
        else:
            active = _activate(one, two, FUNCTION, ALPHA, LIMIT)
            if input_scale is None:
                active, scale = _quantize(active, memory, meeting, CONSUMER)
                meeting += 1
            else:
                active, scale = _quantize_by(active, gl.load(input_scale + segment.expert * STRIDE_S).to(gl.float32))
            if CONSUMER == 0:
                row = segment.row + gl.arange(0, TOKENS, scale.type.layout)
                gl.store(out_scales + segment.column * pairs + row, scale, mask=row < segment.end)
            column = _first_row(segment, CONSUMER, FUNCTION)
            store(active.permute((1, 0)), out_desc, segment.row, segment.end, column, buffers, 0)
    return state, meeting


@gluon.jit
def consume(
    scales, out_desc, out_scales, input_scale, partial, flags, memory, pairs,
    CONSUMER: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr, STRIDE_K: gl.constexpr, UPS: gl.constexpr, STRIDE_S: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """The rows of weights of one consumer in every segment of this program; the strides are those of the weights' scales, which
    without ``STRIDE_K`` are of rows. Without ``FUNCTION`` products are stored as they are; with it half of the rows are gates,
    the others their ups, whose scales are ``UPS`` elements after, and what is activated is quantised, by input scales if there
    are any."""
    MOST: gl.constexpr = memory.a.shape[1]
    numbers: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    state = first_stage()
    iteration, meeting = gl.to_tensor(0), gl.to_tensor(0)
    segment = Segment(*receive(memory.mailbox, iteration, numbers))
    while segment.column >= 0:
        iteration += 1
        if MOST > _BOTH and segment.end - segment.row <= _BOTH:  # as in the last tile of an expert
            state, meeting = _tile(
                scales, out_desc, out_scales, input_scale, partial, flags, memory, pairs, segment, state, meeting, _BOTH,
                CONSUMER, DEPTH, WIDTH, STRIDE_E, STRIDE_N, STRIDE_K, UPS, STRIDE_S, FUNCTION, ALPHA, LIMIT,
            )  # fmt: skip
        else:
            state, meeting = _tile(
                scales, out_desc, out_scales, input_scale, partial, flags, memory, pairs, segment, state, meeting, MOST,
                CONSUMER, DEPTH, WIDTH, STRIDE_E, STRIDE_N, STRIDE_K, UPS, STRIDE_S, FUNCTION, ALPHA, LIMIT,
            )  # fmt: skip
        segment = Segment(*receive(memory.mailbox, iteration, numbers))
    tma.store_wait(0)
