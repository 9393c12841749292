"""The producer of the two kernels, one warp: it takes a program's segments and has the copy engine fill the ring of stages."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.gluon_bridge import as_gluon, cp_async, cp_async_arrive, tma_load
from flashmoe_science.ops.moe.products.fp8_sm90.memory import BLOCK, CONSUMERS, STEP
from flashmoe_science.ops.moe.products.stream_k import first_of, part_of_program, segment_of
from flashmoe_science.ops.moe.rows import tables_of
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, publish

_tables_of = as_gluon(tables_of)


@gluon.jit
def _load_weights(w_desc, memory, segment, stage, step):
    """Start to copy the codes of a step, each consumer's rows. Of four dimensions (``launch.py``) a consumer has the gates of
    64 columns, then their ups; of three, rows that follow each other."""
    bar = memory.full.index(stage)
    for c in gl.static_range(CONSUMERS):
        here = memory.w.index(CONSUMERS * stage + c)
        if len(w_desc.block_type.shape) == 4:
            first = segment.column * (BLOCK // 2) + c * (BLOCK // 2 // CONSUMERS)
            tma_load(w_desc, [segment.expert, 0, first, step * STEP], bar, here)
        else:
            first = segment.column * BLOCK + c * (BLOCK // CONSUMERS)
            tma_load(w_desc, [segment.expert, first, step * STEP], bar, here)


@gluon.jit
def _load_tokens(a_desc, of_a, memory, segment, stage, step, pairs, layout: gl.constexpr):
    """Start to copy the tokens' K of a step and their scales. Rows past an expert's end are the next one's; no one stores what
    they give. Scales begin at any row, and the copy engine only at a multiple of 16 bytes."""
    row = segment.row + gl.arange(0, memory.of_a.shape[1], layout)  # [TOKENS]
    tma_load(a_desc, [segment.row, step * STEP], memory.full.index(stage), memory.a.index(stage))
    cp_async(memory.of_a.index(stage), of_a + step * pairs + row, mask=row < segment.end)
    cp_async_arrive(memory.full.index(stage), increment_count=False)


@gluon.jit
def _fill(
    a_desc, of_a, w_desc, memory, segment, state, first, stop, pairs,
    layout: gl.constexpr, WEIGHTS: gl.constexpr = True, TOKENS: gl.constexpr = True,
):  # fmt: skip
    """Fill stages with the steps of a segment from ``first`` to before ``stop``: with ``WEIGHTS``, with ``TOKENS``, or both."""
    STAGES: gl.constexpr = memory.a.shape[0]
    nbytes: gl.constexpr = CONSUMERS * w_desc.block_type.nbytes + a_desc.block_type.nbytes
    for step in range(first, stop):
        if WEIGHTS:
            mbarrier.wait(memory.empty.index(state.stage), state.phase ^ 1)
            mbarrier.expect(memory.full.index(state.stage), nbytes)
            _load_weights(w_desc, memory, segment, state.stage, step)
        if TOKENS:
            _load_tokens(a_desc, of_a, memory, segment, state.stage, step, pairs, layout)
        state = advance(state, STAGES)
    return state


@gluon.jit
def produce(
    a_desc, of_a, w_desc, tables, pairs, tiles, memory,
    EXPERTS: gl.constexpr, STEPS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Fill the stages of all segments of this program."""
    TOKENS: gl.constexpr = a_desc.block_type.shape[0]
    STAGES: gl.constexpr = memory.a.shape[0]
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    parts = _tables_of(tables, pairs, EXPERTS, tiles)
    part = part_of_program(parts, STEPS, COLUMNS)
    nth = first_of(part)
    segment = segment_of(nth, part, parts, tiles, STEPS, COLUMNS, GROUP, TOKENS)
    # Weights and the tables are older than the kernel before this one, which may still write the tokens.
    early = gl.minimum(segment.stop, segment.first + STAGES)
    _fill(a_desc, of_a, w_desc, memory, segment, first_stage(), segment.first, early, pairs, one, TOKENS=False)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    gdc_launch_dependents()  # only now: the next kernel reads the tables before its own wait
    state = _fill(a_desc, of_a, w_desc, memory, segment, first_stage(), segment.first, early, pairs, one, WEIGHTS=False)
    iteration = gl.to_tensor(0)
    while segment.column >= 0:
        publish(memory.mailbox, iteration, segment, one)
        iteration += 1
        state = _fill(a_desc, of_a, w_desc, memory, segment, state, early, segment.stop, pairs, one)
        nth += 1
        segment = segment_of(nth, part, parts, tiles, STEPS, COLUMNS, GROUP, TOKENS)
        early = segment.first
    publish(memory.mailbox, iteration, (-1, 0, 0, 0, 0, 0, 0), one)
