"""The producer of the two kernels, one warp: it takes a program's segments and has the copy engine fill the ring of stages."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.gluon_bridge import as_gluon, tma_load
from flashmoe_science.ops.moe.products.stream_k import first_of, part_of_program, segment_of
from flashmoe_science.ops.moe.products.weights_sm90 import scales as of
from flashmoe_science.ops.moe.products.weights_sm90.operand import (
    APART,
    BYTES_OF_STAGE,
    CHUNK,
    PAIR,
    QUADS,
    ROWS,
    STEP,
    chunks_of,
    span_of,
)
from flashmoe_science.ops.moe.rows import tables_of
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, publish

LATE = gl.constexpr(4)  # stages before a segment's end at which the next one is looked up
_tables_of = as_gluon(tables_of)


@gluon.jit
def _load_weights(w_desc, memory, segment, stage, nth, EXPERT_BLOCKS: gl.constexpr, FORMAT: gl.constexpr):
    """Start to copy the bytes of the ``nth`` stage of K, each consumer's rows. Of five dimensions (``launch.py``) a consumer
    has those of a stage's columns that follow each other in the second product's K, gates and ups; of three, rows that follow
    each other."""
    bar = memory.full.index(stage)
    CONSUMERS: gl.constexpr = memory.out.shape[0]
    COUNT: gl.constexpr = memory.w.numel // memory.w.shape[0] // BYTES_OF_STAGE
    PARTS: gl.constexpr = 8 * span_of(FORMAT) // COUNT
    for c in gl.static_range(CONSUMERS):
        here, part = memory.w.index(CONSUMERS * stage + c), segment.column * CONSUMERS + c
        if EXPERT_BLOCKS is not None:
            first = segment.expert * EXPERT_BLOCKS + part // PARTS * 4
            tma_load(w_desc, [first, part % PARTS * w_desc.block_type.shape[1], 0, 0, nth * BYTES_OF_STAGE], bar, here)
        else:
            tma_load(w_desc, [segment.expert, part * COUNT, nth * BYTES_OF_STAGE], bar, here)


@gluon.jit
def _load_tokens(a_desc, memory, segment, stage, nth, CHUNKS: gl.constexpr):
    """Start to copy the tokens' K of a stage. Rows past an expert's end are the next one's; no one stores what they give."""
    for c in gl.static_range(CHUNKS):
        here = memory.a.index(CHUNKS * stage + c)
        tma_load(a_desc, [segment.row, nth * (CHUNKS * CHUNK) + c * CHUNK], memory.full.index(stage), here)


@gluon.jit
def _fill(
    w_desc, a_desc, memory, segment, state, first, stop,
    EXPERT_BLOCKS: gl.constexpr, FORMAT: gl.constexpr, WEIGHTS: gl.constexpr = True, TOKENS: gl.constexpr = True,
):  # fmt: skip
    """Fill stages with those of a segment's K from ``first`` to before ``stop``: with ``WEIGHTS``, with ``TOKENS``, or both."""
    CONSUMERS: gl.constexpr = memory.out.shape[0]
    STAGES: gl.constexpr = memory.w.shape[0] // CONSUMERS
    CHUNKS: gl.constexpr = chunks_of(FORMAT)
    nbytes: gl.constexpr = CONSUMERS * w_desc.block_type.nbytes + CHUNKS * a_desc.block_type.nbytes
    for nth in range(first, stop):
        if WEIGHTS:
            mbarrier.wait(memory.empty.index(state.stage), state.phase ^ 1)
            mbarrier.expect(memory.full.index(state.stage), nbytes)
            _load_weights(w_desc, memory, segment, state.stage, nth, EXPERT_BLOCKS, FORMAT)
        if TOKENS:
            _load_tokens(a_desc, memory, segment, state.stage, nth, CHUNKS)
        state = advance(state, STAGES)
    return state


@gluon.jit
def _touch_scales(
    scales, segment, first, WIDTH: gl.constexpr, SCALES: gl.constexpr, COLUMN: gl.constexpr, UP: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Bring the 128 bytes of each row's scales from a segment's ``first`` step to L2, long before consumers load them."""
    here = scales + segment.expert.to(gl.int64) * SCALES[of.OF_EXPERT] + first * (QUADS * SCALES[of.OF_COLUMN])
    for n in range(ROWS // 32):
        row = segment.column * ROWS + n * 32 + gl.arange(0, 32, layout)
        if COLUMN is None:
            row = gl.minimum(row, WIDTH - 1)
        else:
            row = gl.minimum(row // 2, WIDTH - 1) * COLUMN + row % 2 * UP
        pointers = here + row * SCALES[of.OF_ROW]
        gl.inline_asm_elementwise("ld.global.L2::128B.u8 $0, [$1];", "=r,l", [pointers], gl.int32, False, 1)


@gluon.jit
def produce(
    a_desc, w_desc, scales, tables, pairs, tiles, memory,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr, EXPERT_BLOCKS: gl.constexpr,
    WIDTH: gl.constexpr, SCALES: gl.constexpr, COLUMN: gl.constexpr, UP: gl.constexpr,
):  # fmt: skip
    """Fill the stages of all segments of this program; ``TILES``: the most of a group in ``tile_at``."""
    TOKENS: gl.constexpr = a_desc.block_type.shape[0]
    STAGES: gl.constexpr = memory.w.shape[0] // memory.out.shape[0]
    FORMAT: gl.constexpr = SCALES[of.FORMAT]
    STEPS: gl.constexpr = 1 if TOKENS <= APART else PAIR  # of a unit of work
    EACH: gl.constexpr = STEPS * (PAIR // chunks_of(FORMAT))  # its stages
    UNITS: gl.constexpr = (DEPTH + STEPS * STEP - 1) // (STEPS * STEP)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    parts = _tables_of(tables, pairs, EXPERTS, tiles)
    part = part_of_program(parts, UNITS, COLUMNS)
    nth = first_of(part)
    segment = segment_of(nth, part, parts, tiles, UNITS, COLUMNS, TILES, TOKENS)
    # Weights, scales and the tables are older than the kernel before this one, which may still write the tokens.
    publish(memory.mailbox, 0, segment, one)
    first = EACH * segment.first
    early = gl.minimum(EACH * segment.stop, first + STAGES)
    _fill(w_desc, a_desc, memory, segment, first_stage(), first, early, EXPERT_BLOCKS, FORMAT, TOKENS=False)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    gdc_launch_dependents()  # only now: the next kernel reads the tables before its own wait
    state = _fill(w_desc, a_desc, memory, segment, first_stage(), first, early, EXPERT_BLOCKS, FORMAT, WEIGHTS=False)
    iteration = gl.to_tensor(1)
    while segment.column >= 0:
        stop = EACH * segment.stop
        late = gl.maximum(stop - LATE, early)
        state = _fill(w_desc, a_desc, memory, segment, state, early, late, EXPERT_BLOCKS, FORMAT)
        nth += 1
        following = segment_of(nth, part, parts, tiles, UNITS, COLUMNS, TILES, TOKENS)
        early = EACH * following.first
        if SCALES[of.WIDE] == 32:  # a row of the others' takes few bytes
            if following.column >= 0:
                _touch_scales(scales, following, early, WIDTH, SCALES, COLUMN, UP, one)
        state = _fill(w_desc, a_desc, memory, segment, state, late, stop, EXPERT_BLOCKS, FORMAT)
        publish(memory.mailbox, iteration, following, one)
        iteration += 1
        segment = following
