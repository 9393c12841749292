"""The producer of fwd_gluon_sm90.py: one warp that issues the copies of Q, K and V to shared memory.

Of packed sequences the producer also takes the tiles of queries from their list, one after another, and tells the consumers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashmoe_science.ops.attention.device.tiles import coordinates, load_tile, pages_of_tile
from flashmoe_science.ops.attention.forward.prefill_sm90.packed_schedule import NUMBERS_OF_TILE
from flashmoe_science.ops.attention.forward.prefill_sm90.schedule import key_tiles, piece, steps_of_program
from flashmoe_science.ops.gluon_bridge import tma_load
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, give

NUMBERS = gl.constexpr(NUMBERS_OF_TILE)
EVEN_KEYS = gl.constexpr(4)  # times as many keys of a sequence as queries: its tiles cost about the same


@gluon.jit
def _load_chunks(desc, place, row, full, smem, stage, CHUNKS: gl.constexpr):
    """``load_tile`` of a tile that lies in chunks of columns side by side; of one chunk too."""
    mbarrier.expect(full, desc.block_type.nbytes * CHUNKS)
    for n in gl.static_range(CHUNKS):
        tma_load(desc, coordinates(place, row, n * desc.block_type.shape[-1]), full, smem.index(stage * CHUNKS + n))


@gluon.jit
def _load_pages(
    descs, head, pages, pitch, keys, first_row, full, smem, stage, CHUNKS: gl.constexpr, PAGE: gl.constexpr
):  # fmt: skip
    """``_load_chunks`` of a tile whose rows are on ``pages``, ``pitch`` rows from page to page. What follows the last of
    ``keys`` on its page is left out: the copy engine's maps end where a copy says (``descriptors.ragged``)."""
    shape: gl.constexpr = descs[0].block_type.shape
    COPIES: gl.constexpr = smem[0].shape[-2] // shape[-2]
    if len(descs) == 1:
        mbarrier.expect(full, descs[0].block_type.nbytes * (COPIES * CHUNKS))
    else:
        mbarrier.expect(full, (descs[0].block_type.nbytes + descs[1].block_type.nbytes) * COPIES)
    row = first_row % PAGE if smem[0].shape[-2] < PAGE else 0
    for n in gl.static_range(COPIES):
        valid = gl.minimum(gl.maximum(keys - first_row + row - n * shape[-2], 0), PAGE)
        place = (head, gl.where(valid > 0, pages[n] * pitch + valid, 0), valid)
        for chunk in gl.static_range(CHUNKS):
            rows = smem[0].index(stage * CHUNKS + chunk).slice(n * shape[-2], shape[-2], 3)
            tma_load(descs[0], coordinates(place, row, chunk * shape[-1]), full, rows)
        if len(descs) == 2:
            rows = smem[1].index(stage).slice(n * shape[-2], shape[-2], 3)
            tma_load(descs[1], coordinates(place, row, shape[-1]), full, rows)


@gluon.jit
def _fill(
    q_descs, k_descs, v_desc, memory, barriers, place_q, place_k, cache,
    batch, first_row, span, turn, rings,
    CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, ALIGNED: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Issue the copies of one tile of queries and of the tiles of keys that it sees. ``cache``: of keys in pages the table, its
    entries from sequence to sequence, and rows from page to page of K and of V. ``rings``: stage and phase of K's, then of V's;
    returned as they are then."""
    stage_k, phase_k, stage_v, phase_v = rings
    q_smem, k_smem, v_smem, o_smem = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    QUERIES: gl.constexpr = q_smem[0].shape[-2]
    STAGES_Q: gl.constexpr = q_smem[0].shape[0] // CONSUMERS
    STAGES_V: gl.constexpr = v_full.shape[0]
    CHUNKS: gl.constexpr = v_smem[0].shape[0] // STAGES_V
    BLOCK_N: gl.constexpr = k_smem[0].shape[-2]
    if span[3] is not None:
        span = (span[0], span[1], span[2], gl.load(span[3] + batch), span[4])
    low, high = key_tiles(first_row, CONSUMERS * QUERIES, span, BLOCK_N, CAUSAL, ALIGNED)
    for consumer in gl.static_range(CONSUMERS):
        slot = turn % STAGES_Q * CONSUMERS + consumer
        mbarrier.wait(q_empty.index(slot), (turn // STAGES_Q & 1) ^ 1)
        load_tile(q_descs, place_q, first_row + consumer * QUERIES, q_full.index(slot), q_smem, slot)
    if PAGE > 0:
        table, step, pitch_k, pitch_v = cache
        table += batch.to(gl.int64) * step
        count = (span[1] + PAGE - 1) // PAGE
    # In the order in which consumers ask: K of a tile before V of the tile before it.
    for i in range(high - low + 1):
        if i < high - low:
            row = (high - 1 - i) * BLOCK_N
            if PAGE == 0:
                mbarrier.wait(k_empty.index(stage_k), phase_k ^ 1)
                load_tile(k_descs, place_k, row, k_full.index(stage_k), k_smem, stage_k)
            else:  # the table is read before the wait, which hides how long that takes
                pages = pages_of_tile(table, count, row, BLOCK_N, PAGE)
                mbarrier.wait(k_empty.index(stage_k), phase_k ^ 1)
                _load_pages(k_descs, place_k[0], pages, pitch_k, span[1], row, k_full.index(stage_k), k_smem, stage_k, 1, PAGE)
            stage_k, phase_k = advance(stage_k, phase_k, k_smem[0].shape[0])
        if i > 0:
            row = (high - i) * BLOCK_N
            full = v_full.index(stage_v)
            if PAGE == 0:
                mbarrier.wait(v_empty.index(stage_v), phase_v ^ 1)
                _load_chunks(v_desc, place_k, row, full, v_smem[0], stage_v, CHUNKS)
            else:
                pages = pages_of_tile(table, count, row, BLOCK_N, PAGE)
                mbarrier.wait(v_empty.index(stage_v), phase_v ^ 1)
                _load_pages((v_desc,), place_k[0], pages, pitch_v, span[1], row, full, v_smem, stage_v, CHUNKS, PAGE)
            stage_v, phase_v = advance(stage_v, phase_v, STAGES_V)
    return stage_k, phase_k, stage_v, phase_v


@gluon.jit
def produce(
    q_descs, k_descs, v_desc, memory, barriers, work,
    CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, ALIGNED: gl.constexpr, DEAL: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The producer: one warp that issues every copy from device memory."""
    sizes, tiles, board, prefix, left, cache = work
    heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds = sizes
    HEADS: gl.constexpr = memory[0][0].shape[-3]  # in a tile of queries
    QUERIES: gl.constexpr = memory[0][0].shape[-2]  # of a consumer
    rings = first_stage() + first_stage()
    turn = gl.to_tensor(0)  # tiles of queries done so far
    if tiles is None:
        for step in range(steps_of_program(tiles_m, heads_all, pair_rounds, DEAL)):
            has_work, tile_m, head_all = piece(step, tiles_m, heads_all, pair_rounds, CAUSAL, DEAL)
            if has_work:
                batch = head_all // heads
                head = head_all % heads
                rings = _fill(
                    q_descs, k_descs, v_desc, memory, barriers, (batch, head), (batch, head // group), cache,
                    batch, tile_m * (CONSUMERS * QUERIES), (seqlen_q, seqlen_k, causal_offset, prefix, left), turn,
                    rings, CONSUMERS, CAUSAL, ALIGNED or left is not None, PAGE,
                )  # fmt: skip
                turn += 1
    else:
        one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        index = gl.program_id(0)
        columns = heads // HEADS
        count = gl.load(tiles + 1) * columns
        while index < count:
            tile = tiles + (index // columns + 1) * NUMBERS
            batch, first, of_sequence = gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)
            end_q, rows, end_k, keys = gl.load(tile + 3), gl.load(tile + 4), gl.load(tile + 5), gl.load(tile + 6)
            nth = index - first * columns
            column = nth // of_sequence
            if CAUSAL:  # the last queries of all heads first, unless they see about as many keys as the others
                even = keys >= EVEN_KEYS * rows
                column = gl.where(even, column, nth % columns)
                nth = gl.where(even, nth % of_sequence, nth // columns)
            else:
                nth = nth % of_sequence
            head = column * HEADS
            first_row = (of_sequence - 1 - nth) * (CONSUMERS * QUERIES)
            give(board, turn, (head, batch, first_row, end_q, rows, keys), one)
            rings = _fill(
                q_descs, k_descs, v_desc, memory, barriers, (head, end_q, rows), (head // group, end_k, keys), cache,
                batch, first_row, (rows, keys, keys - rows + causal_offset, prefix, left), turn,
                rings, CONSUMERS, CAUSAL, True, PAGE,
            )  # fmt: skip
            turn += 1
            index = gl.num_programs(0) + gl.atomic_add(tiles, 1, sem="relaxed")
        give(board, turn, (-1, 0, 0, 0, 0, 0), one)
