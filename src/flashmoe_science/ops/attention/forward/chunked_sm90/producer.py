"""The producer of chunk_gluon_sm90: one warp that issues the copies of Q, K and V to shared memory, by pages too."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashmoe_science.ops.attention.device.tiles import Origin, load_pages, load_tile, pages_of_tile, row_on_page
from flashmoe_science.ops.pipeline_gluon import advance, first_stage


@gluon.jit
def _first_key(tile, low, first_k, BLOCK_N: gl.constexpr):
    """The row of K and V where a tile begins; of one before ``low``, which pads an unrolled few, past every row: zeros."""
    return gl.where(tile < low, 1 << 30, first_k + tile * BLOCK_N)


@gluon.jit
def _load_keys(descs, loads, tile, empty, full, smem, state, PAGE: gl.constexpr):
    """Start the copies of a tile of K or V to a stage once it is free. Returns the PipelineState after it."""
    BLOCK_N: gl.constexpr = smem[0].shape[-2]
    keys, low = loads.keys, loads.tiles.low
    if PAGE == 0:
        mbarrier.wait(empty.index(state.stage), state.phase ^ 1)
        row = _first_key(tile, low, keys.first, BLOCK_N)
        load_tile(descs, Origin((keys.batch, loads.head_kv)), row, full.index(state.stage), smem, state.stage)
    else:  # the table is read before the wait, which hides how long that takes
        pages = pages_of_tile(keys.table, keys.count, _first_key(tile, low, 0, BLOCK_N), BLOCK_N, PAGE)
        mbarrier.wait(empty.index(state.stage), state.phase ^ 1)
        stage_full, row = full.index(state.stage), row_on_page(tile * BLOCK_N, BLOCK_N, PAGE)
        load_pages(descs, loads.head_kv, pages, None, None, row, stage_full, smem, state.stage, PAGE)
    return advance(state, full.shape[0])


@gluon.jit
def produce(descs, buffers, barriers, loads, TRAITS: gl.constexpr):
    """The producer: one warp that issues every copy from device memory."""
    low, high, count = loads.tiles
    k_state, v_state = first_stage(), first_stage()
    if count > 0:
        for consumer in gl.static_range(TRAITS.CONSUMERS):
            row = loads.first_row + consumer * TRAITS.QUERIES
            origin = Origin((loads.batch_q, loads.head_kv, loads.first_head))
            load_tile(descs.q, origin, row, barriers.q_full.index(consumer), buffers.q, consumer)
        # In the order in which consumers wait for them: K of a tile before V of the tile before it.
        for i in range(count + 1):
            if i < count:
                k_state = _load_keys(
                    descs.k, loads, high - 1 - i, barriers.k_empty, barriers.k_full, buffers.k, k_state, TRAITS.PAGE
                )
            if i > 0:
                v_state = _load_keys(
                    descs.v, loads, high - i, barriers.v_empty, barriers.v_full, buffers.v, v_state, TRAITS.PAGE
                )
