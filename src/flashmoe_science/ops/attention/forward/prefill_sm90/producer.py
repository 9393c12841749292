"""The producer of fwd_gluon_sm90: one warp that issues the copies of Q, K and V to shared memory.

Of packed sequences the producer also takes the tiles of queries from their list, one after another, and publishes them to the
consumers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashmoe_science.ops.attention.device.kv_pipeline import KVState, first_kv
from flashmoe_science.ops.attention.device.mask import MaskBounds
from flashmoe_science.ops.attention.device.tiles import Origin, RaggedOrigin, load_pages, load_tile, pages_of_tile
from flashmoe_science.ops.attention.forward.prefill_sm90.packed_schedule import NUMBERS_OF_TILE
from flashmoe_science.ops.attention.forward.prefill_sm90.schedule import key_tiles, steps_of_program, tile_at
from flashmoe_science.ops.pipeline_gluon import advance, publish

NUMBERS = gl.constexpr(NUMBERS_OF_TILE)
EVEN_KEYS = gl.constexpr(4)  # times as many keys of a sequence as queries: its tiles cost about the same


@gluon.jit
def _fill_query(descs, buffers, barriers, origin, first_row, iteration, TRAITS: gl.constexpr):
    """Issue the copies of a tile of queries."""
    QUERIES: gl.constexpr = buffers.q[0].shape[-2]
    STAGES_Q: gl.constexpr = buffers.q[0].shape[0] // TRAITS.CONSUMERS
    for consumer in gl.static_range(TRAITS.CONSUMERS):
        stage = iteration % STAGES_Q * TRAITS.CONSUMERS + consumer
        mbarrier.wait(barriers.q_empty.index(stage), (iteration // STAGES_Q & 1) ^ 1)
        load_tile(descs.q, origin, first_row + consumer * QUERIES, barriers.q_full.index(stage), buffers.q, stage)


@gluon.jit
def _fill(
    descs, buffers, barriers, origin_q, origin_k, head_kv, pages, batch, first_row, bounds, iteration, kv, TRAITS: gl.constexpr
):  # fmt: skip
    """Issue the copies of one tile of queries and of the tiles of keys that it sees. Returns the KVState after them."""
    QUERIES: gl.constexpr = buffers.q[0].shape[-2]
    STAGES_Q: gl.constexpr = buffers.q[0].shape[0] // TRAITS.CONSUMERS
    STAGES_K: gl.constexpr = barriers.k_full.shape[0]
    STAGES_V: gl.constexpr = barriers.v_full.shape[0]
    CHUNKS: gl.constexpr = buffers.v[0].shape[0] // STAGES_V
    BLOCK_N: gl.constexpr = buffers.k[0].shape[-2]
    PAGE: gl.constexpr = TRAITS.PAGE
    if bounds.prefix is not None:
        prefix = gl.load(bounds.prefix + batch)
        bounds = MaskBounds(bounds.seqlen_q, bounds.seqlen_k, bounds.diagonal, prefix, bounds.left)
    low, high = key_tiles(first_row, TRAITS.CONSUMERS * QUERIES, bounds, BLOCK_N, TRAITS.CAUSAL)
    if STAGES_Q > 1:
        _fill_query(descs, buffers, barriers, origin_q, first_row, iteration, TRAITS)
    if PAGE > 0:
        table = pages.table + batch.to(gl.int64) * pages.stride
        count = (bounds.seqlen_k + PAGE - 1) // PAGE
    # In the order in which consumers wait for them: K of a tile before V of the tile before it.
    for i in range(high - low + 1):
        if i < high - low:
            row = (high - 1 - i) * BLOCK_N
            if PAGE == 0:
                mbarrier.wait(barriers.k_empty.index(kv.k.stage), kv.k.phase ^ 1)
                load_tile(descs.k, origin_k, row, barriers.k_full.index(kv.k.stage), buffers.k, kv.k.stage)
            else:  # the table is read before the wait, which hides how long that takes
                numbers = pages_of_tile(table, count, row, BLOCK_N, PAGE)
                mbarrier.wait(barriers.k_empty.index(kv.k.stage), kv.k.phase ^ 1)
                full = barriers.k_full.index(kv.k.stage)
                load_pages(
                    descs.k, head_kv, numbers, pages.pitch_k, bounds.seqlen_k, row, full, buffers.k, kv.k.stage, PAGE
                )
            kv = KVState(advance(kv.k, STAGES_K), kv.v)
            if STAGES_Q == 1 and i == 0:  # Q before it may be in use still, while a stage of K is free
                _fill_query(descs, buffers, barriers, origin_q, first_row, iteration, TRAITS)
        if i > 0:
            row = (high - i) * BLOCK_N
            full = barriers.v_full.index(kv.v.stage)
            if PAGE == 0:
                mbarrier.wait(barriers.v_empty.index(kv.v.stage), kv.v.phase ^ 1)
                load_tile(descs.v, origin_k, row, full, buffers.v, kv.v.stage, CHUNKS)
            else:
                numbers = pages_of_tile(table, count, row, BLOCK_N, PAGE)
                mbarrier.wait(barriers.v_empty.index(kv.v.stage), kv.v.phase ^ 1)
                load_pages(
                    descs.v, head_kv, numbers, pages.pitch_v, bounds.seqlen_k, row, full, buffers.v, kv.v.stage, PAGE, CHUNKS
                )
            kv = KVState(kv.k, advance(kv.v, STAGES_V))
    return kv


@gluon.jit
def produce(descs, buffers, barriers, work, TRAITS: gl.constexpr):
    """The producer: one warp that issues every copy from device memory."""
    sizes = work.sizes
    HEADS: gl.constexpr = buffers.q[0].shape[-3]  # in a tile of queries
    ROWS: gl.constexpr = TRAITS.CONSUMERS * buffers.q[0].shape[-2]
    kv = first_kv()
    iteration = gl.to_tensor(0)  # tiles of queries done so far
    if work.tiles is None:
        for step in range(steps_of_program(sizes, TRAITS.SCHEDULE)):
            has_work, tile_m, head_all = tile_at(step, sizes, TRAITS.CAUSAL, TRAITS.SCHEDULE)
            if has_work:
                batch = head_all // sizes.heads
                head = head_all % sizes.heads
                head_kv = head // sizes.group
                bounds = MaskBounds(sizes.seqlen_q, sizes.seqlen_k, sizes.causal_offset, work.prefix, work.left)
                kv = _fill(
                    descs, buffers, barriers, Origin((batch, head)), Origin((batch, head_kv)), head_kv, work.pages,
                    batch, tile_m * ROWS, bounds, iteration, kv, TRAITS,
                )  # fmt: skip
                iteration += 1
    else:
        one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        index = gl.program_id(0)
        columns = sizes.heads // HEADS
        count = gl.load(work.tiles + 1) * columns
        while index < count:
            tile = work.tiles + (index // columns + 1) * NUMBERS
            batch, first, of_sequence = gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)
            end_q, rows, end_k, keys = gl.load(tile + 3), gl.load(tile + 4), gl.load(tile + 5), gl.load(tile + 6)
            nth = index - first * columns
            column = nth // of_sequence
            if TRAITS.CAUSAL:  # the last queries of all heads first, unless they see about as many keys as the others
                even = keys >= EVEN_KEYS * rows
                column = gl.where(even, column, nth % columns)
                nth = gl.where(even, nth % of_sequence, nth // columns)
            else:
                nth = nth % of_sequence
            head = column * HEADS
            first_row = (of_sequence - 1 - nth) * ROWS
            published = end_q
            if TRAITS.SINKS:  # the sign says whether rows are the rest's: consumers keep no number more over their loop
                published = gl.where(keys < 0, -end_q, end_q)
            publish(work.mailbox, iteration, (head, batch, first_row, published, rows, keys), one)
            head_kv = head // sizes.group
            bounds = MaskBounds(rows, keys, keys - rows + sizes.causal_offset, work.prefix, work.left)
            kv = _fill(
                descs, buffers, barriers, RaggedOrigin(head, end_q, rows), RaggedOrigin(head_kv, end_k, keys), head_kv,
                work.pages, batch, first_row, bounds, iteration, kv, TRAITS,
            )  # fmt: skip
            iteration += 1
            index = gl.num_programs(0) + gl.atomic_add(work.tiles, 1, sem="relaxed")
        publish(work.mailbox, iteration, (-1, 0, 0, 0, 0, 0), one)
