"""The producer of the two kernels, one warp: it takes a program's segments and has the copy engine fill the ring of stages."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.gluon_bridge import as_gluon, tma_load
from flashmoe_science.ops.moe.products.mxfp4_sm90.memory import CHUNKS
from flashmoe_science.ops.moe.products.mxfp4_sm90.operand import APART, BLOCK, CHUNK, GROUP, PAIR, STEP
from flashmoe_science.ops.moe.products.stream_k import first_of, part_of_program, segment_of
from flashmoe_science.ops.moe.rows import tables_of
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, publish

LATE = gl.constexpr(4)  # steps before a segment's end at which the next one is looked up
_tables_of = as_gluon(tables_of)


@gluon.jit
def _load_weights(w_desc, memory, segment, stage, step, EXPERT_BLOCKS: gl.constexpr):
    """Start to copy the bytes of a step, each consumer's rows. Of five dimensions (``launch.py``) a consumer has those of
    128 columns that follow each other in the second product's K, gates and ups; of three, rows that follow each other."""
    bar = memory.full.index(stage)
    CONSUMERS: gl.constexpr = memory.out.shape[0]
    ROWS: gl.constexpr = memory.w.numel // memory.w.shape[0] // (STEP // 2)
    PARTS: gl.constexpr = BLOCK // ROWS
    for c in gl.static_range(CONSUMERS):
        here, part = memory.w.index(CONSUMERS * stage + c), segment.column * CONSUMERS + c
        if EXPERT_BLOCKS is not None:
            first = segment.expert * EXPERT_BLOCKS + part // PARTS * 4
            tma_load(w_desc, [first, part % PARTS * w_desc.block_type.shape[1], 0, 0, step * (STEP // 2)], bar, here)
        else:
            tma_load(w_desc, [segment.expert, part * ROWS, step * (STEP // 2)], bar, here)


@gluon.jit
def _load_tokens(a_desc, memory, segment, stage, step):
    """Start to copy the tokens' K of a step. Rows past an expert's end are the next one's; no one stores what they give."""
    for c in gl.static_range(CHUNKS):
        here = memory.a.index(CHUNKS * stage + c)
        tma_load(a_desc, [segment.row, step * STEP + c * CHUNK], memory.full.index(stage), here)


@gluon.jit
def _fill(
    w_desc, a_desc, memory, segment, state, first, stop,
    EXPERT_BLOCKS: gl.constexpr, WEIGHTS: gl.constexpr = True, TOKENS: gl.constexpr = True,
):  # fmt: skip
    """Fill stages with the steps of a segment from ``first`` to before ``stop``: with ``WEIGHTS``, with ``TOKENS``, or both."""
    CONSUMERS: gl.constexpr = memory.out.shape[0]
    STAGES: gl.constexpr = memory.w.shape[0] // CONSUMERS
    nbytes: gl.constexpr = CONSUMERS * w_desc.block_type.nbytes + CHUNKS * a_desc.block_type.nbytes
    for step in range(first, stop):
        if WEIGHTS:
            mbarrier.wait(memory.empty.index(state.stage), state.phase ^ 1)
            mbarrier.expect(memory.full.index(state.stage), nbytes)
            _load_weights(w_desc, memory, segment, state.stage, step, EXPERT_BLOCKS)
        if TOKENS:
            _load_tokens(a_desc, memory, segment, state.stage, step)
        state = advance(state, STAGES)
    return state


@gluon.jit
def _touch_scales(
    scales, segment, first, WIDTH: gl.constexpr, STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr, COLUMN: gl.constexpr,
    UP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Bring the 128 bytes of each row's scales from a segment's ``first`` step to L2, long before consumers load them."""
    here = scales + segment.expert.to(gl.int64) * STRIDE_E + first * (STEP // GROUP)
    for n in range(BLOCK // 32):
        row = segment.column * BLOCK + n * 32 + gl.arange(0, 32, layout)
        if COLUMN is None:
            row = gl.minimum(row, WIDTH - 1)
        else:
            row = gl.minimum(row // 2, WIDTH - 1) * COLUMN + row % 2 * UP
        gl.inline_asm_elementwise("ld.global.L2::128B.u8 $0, [$1];", "=r,l", [here + row * STRIDE_N], gl.int32, False, 1)


@gluon.jit
def produce(
    a_desc, w_desc, scales, tables, pairs, tiles, memory,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr, EXPERT_BLOCKS: gl.constexpr,
    WIDTH: gl.constexpr, STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr, COLUMN: gl.constexpr, UP: gl.constexpr,
):  # fmt: skip
    """Fill the stages of all segments of this program; ``TILES``: the most of a group in ``tile_at``."""
    TOKENS: gl.constexpr = a_desc.block_type.shape[0]
    STAGES: gl.constexpr = memory.w.shape[0] // memory.out.shape[0]
    STEPS: gl.constexpr = 1 if TOKENS <= APART else PAIR  # of a unit of work
    UNITS: gl.constexpr = (DEPTH + STEPS * STEP - 1) // (STEPS * STEP)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    parts = _tables_of(tables, pairs, EXPERTS, tiles)
    part = part_of_program(parts, UNITS, COLUMNS)
    nth = first_of(part)
    segment = segment_of(nth, part, parts, tiles, UNITS, COLUMNS, TILES, TOKENS)
    # Weights, scales and the tables are older than the kernel before this one, which may still write the tokens.
    publish(memory.mailbox, 0, segment, one)
    first = STEPS * segment.first
    early = gl.minimum(STEPS * segment.stop, first + STAGES)
    _fill(w_desc, a_desc, memory, segment, first_stage(), first, early, EXPERT_BLOCKS, TOKENS=False)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    gdc_launch_dependents()  # only now: the next kernel reads the tables before its own wait
    state = _fill(w_desc, a_desc, memory, segment, first_stage(), first, early, EXPERT_BLOCKS, WEIGHTS=False)
    iteration = gl.to_tensor(1)
    while segment.column >= 0:
        stop = STEPS * segment.stop
        late = gl.maximum(stop - LATE, early)
        state = _fill(w_desc, a_desc, memory, segment, state, early, late, EXPERT_BLOCKS)
        nth += 1
        following = segment_of(nth, part, parts, tiles, UNITS, COLUMNS, TILES, TOKENS)
        early = STEPS * following.first
        if following.column >= 0:
            _touch_scales(scales, following, early, WIDTH, STRIDE_E, STRIDE_N, COLUMN, UP, one)
        state = _fill(w_desc, a_desc, memory, segment, state, late, stop, EXPERT_BLOCKS)
        publish(memory.mailbox, iteration, following, one)
        iteration += 1
        segment = following
