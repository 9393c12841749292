"""The producer of chunk_gluon_sm90.py: one warp that issues the copies of Q, K and V to shared memory, by pages too."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashmoe_science.ops.attention.device.tiles import load_tile, pages_of_tile
from flashmoe_science.ops.gluon_bridge import tma_load
from flashmoe_science.ops.pipeline_gluon import advance, first_stage


@gluon.jit
def _load_queries(descs, batch, head_kv, head, query, full, smem, slot):
    """Start the copies of a consumer's rows; ``full`` completes with the last of them."""
    if len(descs) == 1:
        mbarrier.expect(full, descs[0].block_type.nbytes)
    else:
        mbarrier.expect(full, descs[0].block_type.nbytes + descs[1].block_type.nbytes)
    tma_load(descs[0], [batch, head_kv, head, query, 0], full, smem[0].index(slot))
    if len(descs) == 2:
        tma_load(descs[1], [batch, head_kv, head, query, descs[0].block_type.shape[4]], full, smem[1].index(slot))


@gluon.jit
def _first_key(tile, low, first_k, BLOCK_N: gl.constexpr):
    """The row of K and V where a tile begins; of one before ``low``, which pads an unrolled few, past every row: zeros."""
    return gl.where(tile < low, 1 << 30, first_k + tile * BLOCK_N)


@gluon.jit
def _load_pages(descs, pages, head, tile, full, smem, stage, PAGE: gl.constexpr):
    """Start the copies of all rows and parts of a tile from their pages; ``full`` completes with the last of them."""
    BLOCK_N: gl.constexpr = smem[0].shape[3]
    ROWS_: gl.constexpr = descs[0].block_type.shape[2]
    SECOND: gl.constexpr = descs[0].block_type.shape[3]  # the first column of the second part
    row = tile * BLOCK_N % PAGE if PAGE > BLOCK_N else 0
    if len(descs) == 1:
        mbarrier.expect(full, descs[0].block_type.nbytes * (BLOCK_N // ROWS_))
    else:
        mbarrier.expect(full, (descs[0].block_type.nbytes + descs[1].block_type.nbytes) * (BLOCK_N // ROWS_))
    for n in gl.static_range(BLOCK_N // ROWS_):
        tma_load(descs[0], [pages[n], head, row, 0], full, smem[0].index(stage).slice(n * ROWS_, ROWS_, 2))
        if len(descs) == 2:
            tma_load(descs[1], [pages[n], head, row, SECOND], full, smem[1].index(stage).slice(n * ROWS_, ROWS_, 2))


@gluon.jit
def _load_keys(descs, keys, head, tile, low, empty, full, smem, stage, phase, PAGE: gl.constexpr):
    """Start the copies of a tile of K or V to a stage once it is free. ``keys``: row of the cache and first row; with pages the
    sequence's row of the table and how many it has."""
    BLOCK_N: gl.constexpr = smem[0].shape[3]
    if PAGE == 0:
        mbarrier.wait(empty.index(stage), phase ^ 1)
        row = _first_key(tile, low, keys[1], BLOCK_N)
        load_tile(descs, (keys[0], head), row, full.index(stage), smem, stage)
    else:  # the table is read before the wait, which hides how long that takes
        pages = pages_of_tile(keys[0], keys[1], _first_key(tile, low, 0, BLOCK_N), BLOCK_N, PAGE)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        _load_pages(descs, pages, head, tile, full.index(stage), smem, stage, PAGE)


@gluon.jit
def produce(descs, memory, barriers, place, CONSUMERS: gl.constexpr, QUERIES: gl.constexpr, PAGE: gl.constexpr):
    """The producer: one warp that issues every copy from device memory."""
    q_descs, k_descs, v_descs = descs
    q_smem, k_smem, v_smem = memory
    q_full, k_full, k_empty, v_full, v_empty = barriers
    row_q, head_kv, first_head, first_row, keys, low, high, count = place
    STAGES_K: gl.constexpr = k_smem[0].shape[0]
    STAGES_V: gl.constexpr = v_smem[0].shape[0]
    stage_k, phase_k = first_stage()
    stage_v, phase_v = first_stage()
    if count > 0:
        for consumer in gl.static_range(CONSUMERS):
            row = first_row + consumer * QUERIES
            _load_queries(q_descs, row_q, head_kv, first_head, row, q_full.index(consumer), q_smem, consumer)
        # In the order in which consumers ask: K of a tile before V of the tile before it.
        for i in range(count + 1):
            if i < count:
                _load_keys(k_descs, keys, head_kv, high - 1 - i, low, k_empty, k_full, k_smem, stage_k, phase_k, PAGE)
                stage_k, phase_k = advance(stage_k, phase_k, STAGES_K)
            if i > 0:
                _load_keys(v_descs, keys, head_kv, high - i, low, v_empty, v_full, v_smem, stage_v, phase_v, PAGE)
                stage_v, phase_v = advance(stage_v, phase_v, STAGES_V)
