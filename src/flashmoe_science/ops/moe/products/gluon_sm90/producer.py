"""The producer of the two kernels: it schedules tiles and fills the ring of stages with rows and weights.

The first product's rows of x are gathered by cp.async, four warps, as the copy engine of Hopper cannot gather; the second
product's rows follow each other, and the copy engine takes them, one warp. Weights come by the copy engine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashmoe_science.ops.gluon_bridge import as_gluon, cp_async, cp_async_arrive, tma_load
from flashmoe_science.ops.moe.rows import tables_of, tile_at
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, publish

LATE = gl.constexpr(6)  # stages before a tile's end at which the next one is scheduled: as long as its look-up takes
_tables_of = as_gluon(tables_of)
_tile_at = as_gluon(tile_at)


class Low(NamedTuple):
    """The descriptors of a low-rank product that is added to a product, as more of its depth: rows [rows, rank], and weights
    beside those of the product, whose tiles are of their shape. None where there is none."""

    rows: Any
    w: Any


@gluon.constexpr_function
def deepened(depth: int, rank: int, block_k: int) -> int:
    """The depth of a product in whole stages, and of the low-rank product that follows in stages of its own."""
    return (depth + block_k - 1) // block_k * block_k + rank


@gluon.jit
def keep_tokens(pair_of_row, tile, tokens, layout: gl.constexpr, TOP_K: gl.constexpr):
    """Write the tokens of a tile's rows to shared memory, which costs no registers. Rows past the expert's last one get its
    token."""
    CONSUMERS: gl.constexpr = tokens.shape[0]
    ROWS: gl.constexpr = tokens.shape[1]
    for n in gl.static_range(CONSUMERS):
        rows = tile.row + n * ROWS + gl.arange(0, ROWS, layout)  # [ROWS]
        tokens.index(n).store(gl.load(pair_of_row + gl.minimum(rows, tile.end - 1)) // TOP_K)


@gluon.jit
def _gather(base, tokens, rows, smem, stage, first, layout: gl.constexpr, DEPTH: gl.constexpr, STRIDE: gl.constexpr):
    """Start to copy columns from ``first`` of x's rows of ``tokens`` to a stage, a block for each consumer: ``rows`` of them.
    The others become 0; a block of none but those is left as it is."""
    CONSUMERS: gl.constexpr = tokens.shape[0]
    ROWS: gl.constexpr = smem.shape[1]
    BLOCK_K: gl.constexpr = smem.shape[2]
    for n in gl.static_range(CONSUMERS):
        if n * ROWS < rows:
            column = gl.expand_dims(first + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout.parent)), 0)  # [1, BLOCK_K]
            offset = gl.expand_dims(tokens.index(n).load(layout).to(gl.int64) * STRIDE, 1)  # [ROWS, 1]
            mask = gl.expand_dims(n * ROWS + gl.arange(0, ROWS, layout) < rows, 1)
            if DEPTH % BLOCK_K != 0:
                mask = mask & (column < DEPTH)
            cp_async(smem.index(CONSUMERS * stage + n), base + offset + column, mask=mask)  # [ROWS, BLOCK_K]


@gluon.jit
def _weights_at(w_desc, tile, k, TRANSPOSED: gl.constexpr):
    """The coordinates of a tile's weights from depth ``k`` on: [experts, rows, depth]; ``TRANSPOSED`` [experts, depth, rows];
    in five dimensions the first product's, whose rows are gates and ups in turn."""
    ROWS: gl.constexpr = w_desc.block_type.shape[2 if TRANSPOSED else 1]
    if TRANSPOSED:
        return [tile.expert, k, tile.column * ROWS]
    elif len(w_desc.block_type.shape) == 5:
        return [tile.expert, tile.column * ROWS, 0, 0, k]
    else:
        return [tile.expert, tile.column * ROWS, k]


@gluon.jit
def fill(
    a, w_desc, memory, tokens, tile, state,
    START: gl.constexpr, STOP: gl.constexpr, DEPTH: gl.constexpr, STRIDE: gl.constexpr,
    TRANSPOSED: gl.constexpr = False, BESIDE_GATHERED: gl.constexpr = False,
):  # fmt: skip
    """Copy columns from ``START`` to ``STOP`` of a tile's rows and weights to stages of the ring: x's rows of ``tokens``, or
    rows that follow each other. Of the latter, those past an expert's end are the next one's; no one stores them.
    ``BESIDE_GATHERED``: the ring's other stages are gathered, and are full after the arrivals of threads too."""
    STAGES: gl.constexpr = memory.w.shape[0]
    CONSUMERS: gl.constexpr = memory.a.shape[0] // STAGES
    ROWS: gl.constexpr = memory.a.shape[1]
    BLOCK_K: gl.constexpr = memory.a.shape[2]
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    present = gl.minimum((tile.end - tile.row + ROWS - 1) // ROWS, CONSUMERS)  # consumers that have rows
    for k in range(START, STOP, BLOCK_K):
        stage = state.stage
        bar = memory.full.index(stage)
        mbarrier.wait(memory.empty.index(stage), state.phase ^ 1)
        if tokens is None:
            for c in gl.static_range(CONSUMERS):
                mbarrier.expect(bar, w_desc.block_type.nbytes + (c + 1) * a.block_type.nbytes, pred=present == c + 1)
            tma_load(w_desc, _weights_at(w_desc, tile, k, TRANSPOSED), bar, memory.w.index(stage))
            for c in gl.static_range(CONSUMERS):
                tma_load(a, [tile.row + c * ROWS, k], bar, memory.a.index(CONSUMERS * stage + c), pred=c < present)
            if BESIDE_GATHERED:
                cp_async_arrive(bar, increment_count=False)
        else:
            mbarrier.expect(bar, w_desc.block_type.nbytes)
            tma_load(w_desc, _weights_at(w_desc, tile, k, TRANSPOSED), bar, memory.w.index(stage))
            _gather(a, tokens, tile.end - tile.row, memory.a, stage, k, layout, DEPTH, STRIDE)
            cp_async_arrive(bar, increment_count=False)
        state = advance(state, STAGES)
    return state


@gluon.jit
def produce(
    a, w_desc, low, tables, counts, memory, tokens,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, DEPTH: gl.constexpr, RANK: gl.constexpr, STRIDE: gl.constexpr,
    COLUMNS: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr, TRANSPOSED: gl.constexpr = False,
):  # fmt: skip
    """Fill the stages of all tiles of this program: of the first product, or without ``tokens`` of the second. The next tile is
    scheduled as late as its look-up allows before the last one's stages are full, so that programs end at about the same
    time."""
    pairs, tiles = counts
    ROWS: gl.constexpr = memory.a.shape[0] // memory.w.shape[0] * memory.a.shape[1]
    BLOCK_K: gl.constexpr = memory.a.shape[2]
    EARLY: gl.constexpr = max((DEPTH + BLOCK_K - 1) // BLOCK_K - LATE, 0) * BLOCK_K
    PRODUCT: gl.constexpr = 1 if tokens is None else 0
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    parts = _tables_of(tables, pairs, EXPERTS, tiles)
    tile = _tile_at(gl.program_id(0), parts, tiles, COLUMNS, GROUP, ROWS)
    state = first_stage()
    iteration = gl.to_tensor(0)
    while tile.column >= 0:
        publish(memory.mailbox, iteration, (tile.column, tile.row, tile.end), one)
        iteration += 1
        if tokens is not None:
            keep_tokens(parts.pair_of_row, tile, tokens, layout, TOP_K)
        state = fill(a, w_desc, memory, tokens, tile, state, 0, EARLY, DEPTH, STRIDE, TRANSPOSED)
        index = gl.num_programs(0) + gl.atomic_add(parts.counters + PRODUCT, 1, sem="relaxed")
        following = _tile_at(index, parts, tiles, COLUMNS, GROUP, ROWS)
        state = fill(a, w_desc, memory, tokens, tile, state, EARLY, DEPTH, DEPTH, STRIDE, TRANSPOSED)
        if RANK != 0:
            state = fill(low.rows, low.w, memory, None, tile, state, 0, RANK, RANK, 0, TRANSPOSED, tokens is not None)
        tile = following
    publish(memory.mailbox, iteration, (-1, 0, 0), one)
