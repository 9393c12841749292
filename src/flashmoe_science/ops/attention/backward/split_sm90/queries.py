"""dQ = scale dS^T K of a tile of queries, over ascending keys, from the workspace of dS: the second kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashmoe_science.ops.attention.backward.columns import (
    keep,
    load_kept,
    no_columns,
    put,
    scaled,
    start_columns,
    wait_for_columns,
)
from flashmoe_science.ops.attention.device.band import (
    KEYS,
    NONE,
    QUERIES,
    Packed,
    Sequence,
    keys_of_queries,
    number_of_sequence,
    origin_of,
    row_of_space,
    sequence_at,
)
from flashmoe_science.ops.attention.device.tiles import as_matrix, coordinates
from flashmoe_science.ops.gluon_bridge import barrier, reinterpret, tma_load, tma_store
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, make_barriers

SIZES = (
    "heads_kv", "group", "seqlen_k", "tiles_m", "offset", "first_head", "first_step", "first_key", "end_key", "tiles_n",
    "band", "begin", "batches", "total_q", "total_k",
)  # fmt: skip


class Kept(NamedTuple):
    """What holds dQ from a wave to the next, or None: all keys are in one wave. The row of the program's first query."""

    dq: Any
    row: Any


class Work(NamedTuple):
    """What a program works on: keys from ``first_key`` to ``end_key`` in this wave, of the first ``seen`` that any of its
    queries sees; their dS from ``rows`` of the workspace on, ``pitch`` from a tile of the first kernel to the next. Of windows
    and packed sequences (band.py) keys are counted from their sequence's first and seen from ``start`` on."""

    batch: Any
    head: Any
    head_kv: Any
    first_query: Any
    first_key: Any
    end_key: Any
    seen: Any
    rows: Any
    pitch: Any
    start: Any = NONE
    sequence: Any = NONE


@gluon.jit
def _count(work):
    """Tiles of keys in this wave."""
    return (gl.maximum(gl.minimum(work.seen, work.end_key) - _from(work), 0) + KEYS - 1) // KEYS


@gluon.jit
def _from(work):
    """The first key in this wave that any query sees."""
    return work.first_key if work.start is None else gl.maximum(work.start, work.first_key)


@gluon.jit
def _load(ds_desc, k_desc, ds_smem, k_smem, full, empty, work, BLOCK_N: gl.constexpr):
    """The producer: dS of tiles of queries side by side, and K, of KEYS keys a stage."""
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_M: gl.constexpr = ds_desc.block_type.shape[1]
    TILES: gl.constexpr = QUERIES // BLOCK_M
    origin = origin_of(None if work.start is None else work.sequence.keys, work.batch, work.head_kv)
    state = first_stage()
    for i in range(_count(work)):
        mbarrier.wait(empty.index(state.stage), state.phase ^ 1)
        arrived = full.index(state.stage)
        mbarrier.expect(arrived, k_desc.block_type.nbytes + ds_desc.block_type.nbytes * TILES)
        if work.start is None:
            row = work.rows + i * KEYS // BLOCK_N * work.pitch + i * KEYS % BLOCK_N
        else:
            row = row_of_space(work.rows, work.pitch, _from(work) + i * KEYS, work.sequence.offset, TILES, BLOCK_N)
        for n in gl.static_range(TILES):
            ds = ds_smem.index(state.stage)
            if TILES > 1:
                ds = ds.slice(n * BLOCK_M, BLOCK_M, 1)
            tma_load(ds_desc, [row + n * BLOCK_N, 0], arrived, ds)
        tma_load(k_desc, coordinates(origin, _from(work) + i * KEYS, 0), arrived, k_smem.index(state.stage))
        state = advance(state, STAGES)


@gluon.jit
def _resumes(work):
    """Whether a wave before this one kept sums of the program."""
    return work.first_key > 0 if work.start is None else work.start < work.first_key


@gluon.jit
def _continues(work):
    """Whether queries see keys of waves after this one, and of this one or before."""
    if work.start is None:
        return work.seen > work.end_key
    else:
        return (work.seen > work.end_key) & (work.start < work.end_key)


@gluon.jit
def _ends(work):
    """Whether the last key that any query sees is in this wave, which is not one that ``_continues``; where no key is seen,
    whether the place of the first is."""
    if work.start is None:
        return (work.first_key == 0) | (work.seen > work.first_key)
    else:
        last = gl.maximum(work.seen, 1)
        return (last > work.first_key) & (last <= work.end_key)


@gluon.jit
def _consume(dq_desc, ds_smem, k_smem, full, empty, work, kept, scale, WARPS: gl.constexpr, SECOND: gl.constexpr):
    STAGES: gl.constexpr = k_smem.shape[0]
    D: gl.constexpr = k_smem.shape[-1]
    dq = no_columns(QUERIES, D, SECOND, WARPS)
    if kept.dq is not None:
        dq = load_kept(kept.dq, kept.row, dq, _resumes(work), D)
    for i in range(_count(work)):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        ds = ds_smem.index(stage).permute((1, 0))  # [QUERIES, KEYS]
        dq = start_columns(ds, as_matrix(k_smem, stage), dq, SECOND)
        dq = wait_for_columns(len(dq), dq)
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)  # the product before this one is done
    dq = wait_for_columns(0, dq)
    if kept.dq is not None:
        if _continues(work):
            keep(kept.dq, kept.row, dq, D)
        elif _ends(work):
            _write(dq_desc, ds_smem, work, scaled(dq, scale), SECOND)
    else:
        _write(dq_desc, ds_smem, work, scaled(dq, scale), SECOND)


@gluon.jit
def _write(dq_desc, ds_smem, work, dq, SECOND: gl.constexpr):
    """Write dQ by way of the memory of dS."""
    barrier()
    out = reinterpret(ds_smem, dq_desc.dtype, [1] + dq_desc.block_type.shape, dq_desc.layout)
    put(as_matrix(out, 0), dq, SECOND)
    fence_async_shared()
    barrier()
    origin = origin_of(None if work.start is None else work.sequence.queries, work.batch, work.head)
    tma_store(dq_desc, coordinates(origin, work.first_query, 0), out.index(0))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def flashmoe_bwd_dq_gluon_sm90(
    ds_desc, k_desc, dq_desc, dq_kept, cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale,
    heads_kv, group, seqlen_k, tiles_m, offset, first_head, first_step, first_key, end_key, tiles_n,
    band, begin, batches, total_q, total_k,
    WARPS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, PRODUCER_REGS: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """The grid: heads of a set, tiles of queries of the wave, sets of heads of keys. ``tiles_m`` and ``first_step`` are of
    QUERIES, of one head after another that shares the key head; the last ones, which see the most keys, start first."""
    TILES: gl.constexpr = QUERIES // ds_desc.block_type.shape[1]
    head_of_wave = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    tiles = gl.num_programs(1)
    tile = tiles - 1 - gl.program_id(1)
    head_all, step = first_head + head_of_wave, first_step + tile
    first_query = step % tiles_m * QUERIES
    if band is None:
        seen = gl.minimum(seqlen_k, gl.maximum(first_query + QUERIES + offset, 0))
        pitch = tiles * TILES * BLOCK_N
        rows = head_of_wave * tiles_n * pitch + tile * (TILES * BLOCK_N)
        head_kv = head_all % heads_kv
        work = Work(
            head_all // heads_kv, head_kv * group + step // tiles_m, head_kv, first_query, first_key, end_key, seen, rows, pitch
        )
    else:
        sequence = Sequence(tiles_m, seqlen_k, offset)
        if cu_seqlens_q is not None:
            packed = Packed(cu_seqlens_q, cu_seqlens_k, seqused_k, batches, total_q, total_k)
            number = number_of_sequence(cu_seqlens_q, batches, step % tiles_m, QUERIES)
            sequence = sequence_at(packed, number, offset, BLOCK_N)
            if begin is not None:
                begin += sequence.diagonal
            first_query -= sequence.first_row
            before = sequence.first_tile * BLOCK_N
            first_key, end_key = first_key - before, end_key - before
        start, seen = keys_of_queries(sequence, begin, first_query)
        pitch = tiles // tiles_m * band * BLOCK_N
        of_head = (step // tiles_m - first_step // tiles_m) * band + first_query // QUERIES * TILES
        rows = head_of_wave * tiles_n * pitch - first_key // BLOCK_N * pitch + of_head * BLOCK_N
        head_kv = head_all % heads_kv
        work = Work(
            head_all // heads_kv, head_kv * group + step // tiles_m, head_kv, first_query, first_key, end_key, seen, rows,
            pitch, start, sequence,
        )  # fmt: skip
    kept = Kept(dq_kept, (head_of_wave * group * tiles_m + step) * QUERIES)
    ds_smem = gl.allocate_shared_memory(ds_desc.dtype, [STAGES, KEYS, QUERIES], ds_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    full, empty = make_barriers(STAGES, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (dq_desc, ds_smem, k_smem, full, empty, work, kept, softmax_scale, WARPS, SECOND)),
            (_load, (ds_desc, k_desc, ds_smem, k_smem, full, empty, work, BLOCK_N)),
        ],
        [1], [PRODUCER_REGS],
    )  # fmt: skip
