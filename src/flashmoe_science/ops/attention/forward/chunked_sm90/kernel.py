"""Attention of few queries to many keys for Hopper in Gluon: packed query heads, split-KV, TMA and wgmma.

Shapes: Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv] -> O [B, H, Sq, Dv], LSE [B, H, Sq]; or a cache of keys and values,
contiguous or in pages, with its lengths on the device; or packed queries (problem/features.py); with a window, a soft cap
and sinks. fp16 and bf16, D and Dv multiples of 8 up to 256. Compute capability 9.0 only.

A consumer warpgroup (consumer.py, step.py) has 64 rows: ``BLOCK_G`` of the query heads that share a key head, times
64 / ``BLOCK_G`` queries, one TMA copy, which fills missing heads with zeros. A program is one or two consumers and a producer
warp (producer.py), as in prefill_sm90, for one tile of queries and a contiguous split of the keys that the tile sees. Where
there are several splits, it writes its running maximum, its sum and its unscaled output in fp32, which device/merge_gluon.py
adds in the order of the splits: equal calls give equal bits.

Keys go from the last tile to the first. The diagonal crosses the last few alone, which are unrolled: the loop has no mask. With
a window on the left the first few are crossed too: the loop branches around a mask then.

Of a paged cache a tile of keys is a part of a page, or several pages, each by a copy of its own; all complete one barrier.

Split-KV: Dao et al. 2023 (Flash-Decoding). Warp specialisation: Shah et al. 2024 (FlashAttention-3).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, our_kernel, run_planned
from flashmoe_science.ops.attention.device import merge_gluon as chunk_merge
from flashmoe_science.ops.attention.device.kv_pipeline import Barriers, Buffers, Descriptors
from flashmoe_science.ops.attention.device.output import rest_lanes
from flashmoe_science.ops.attention.device.ranges import index_in_lpt_order, used_splits
from flashmoe_science.ops.attention.device.sequences import Sequences, keys_of, packed_rows, write_rest
from flashmoe_science.ops.attention.device.sm90 import threads
from flashmoe_science.ops.attention.device.softcap import Scales, capped_scales
from flashmoe_science.ops.attention.device.tiles import allocate_tiles, parts_of
from flashmoe_science.ops.attention.forward.chunked_sm90.arguments import (
    CachePages,
    CacheRows,
    KeyTiles,
    Loads,
    Output,
    Rows,
    Traits,
)
from flashmoe_science.ops.attention.forward.chunked_sm90.config import (
    LAST_SIZES,
    configs,
    splits_for,
    suits,
    supports,
    work_in,
    workspace,
)
from flashmoe_science.ops.attention.forward.chunked_sm90.consumer import consume
from flashmoe_science.ops.attention.forward.chunked_sm90.launch import ChunkLauncher
from flashmoe_science.ops.attention.forward.chunked_sm90.producer import produce
from flashmoe_science.ops.attention.forward.chunked_sm90.step import keys_back
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.pipeline_gluon import make_barriers

NAME = "chunk_gluon_sm90"
# Not specialised on: a new batch or length must not compile anew.
SIZES = ("left", "right", *LAST_SIZES)


@gluon.jit
def _lengths(sequences, batch, batches):
    """Keys of sequences, which may be negative; past the sequences the least number, which comes last in LPT order."""
    ok = batch < batches
    if sequences.cache_seqlens is not None:
        return gl.load(sequences.cache_seqlens + batch, mask=ok, other=-2147483648)
    else:
        end = gl.load(sequences.cu_seqlens_k + batch + 1, mask=ok, other=-2147483648)
        return end - gl.load(sequences.cu_seqlens_k + batch, mask=ok, other=0)


@gluon.jit
def _nth_longest(sequences, index, batches, BATCHES: gl.constexpr):
    """The sequence at ``index`` in LPT order of ``batches`` sequences, BATCHES at the most."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, BATCHES, gl.SliceLayout(1, layout))
    column = gl.arange(0, BATCHES, gl.SliceLayout(0, layout))
    own, others = _lengths(sequences, row, batches), _lengths(sequences, column, batches)
    return index_in_lpt_order(own[:, None], others[None, :], row[:, None], column[None, :], row, index)


@gluon.jit(do_not_specialize=SIZES)
def flashmoe_chunk_gluon_sm90(
    q_desc, k_desc, v_desc, q_rest, k_rest, v_rest, out_base, lse_base, partials,
    cu_seqlens_q, cu_seqlens_k, cache_seqlens, cache_batch_idx, page_table, sinks, softmax_scale, softcap, left, right,
    stride_ob, stride_oh, stride_om, stride_lse, heads_kv, seqlen_q, seqlen_k, splits, all_rows, stride_table, batches,
    GROUP: gl.constexpr, DV: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES_K: gl.constexpr, STAGES_V: gl.constexpr, MIN_TILES: gl.constexpr, PEELED: gl.constexpr,
    CAUSAL: gl.constexpr, TOPLEFT: gl.constexpr, SPLIT: gl.constexpr, COMPENSATED: gl.constexpr, PAGE: gl.constexpr,
    BATCHES: gl.constexpr, EARLY_START: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    BLOCK_G: gl.constexpr = q_desc.block_type.shape[2]
    QUERIES: gl.constexpr = q_desc.block_type.shape[3]  # of a consumer
    HEAD_TILES: gl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    # Where no cache is, nothing but zeros follows the last key. Without the branch a causal build spills 112 bytes a thread.
    ZEROED: gl.constexpr = CAUSAL or cache_seqlens is not None or cu_seqlens_k is not None
    TRAITS: gl.constexpr = Traits(CONSUMERS, QUERIES, GROUP, DV, PEELED, CAUSAL, SPLIT, ZEROED, COMPENSATED, PAGE)
    descs = Descriptors(parts_of(q_desc, q_rest), parts_of(k_desc, k_rest), parts_of(v_desc, v_rest))
    q_smem = allocate_tiles(descs.q, CONSUMERS)
    k_smem = allocate_tiles(descs.k, STAGES_K, BLOCK_N)
    v_smem = allocate_tiles(descs.v, STAGES_V, BLOCK_N)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
    k_full, k_empty = make_barriers(STAGES_K, CONSUMERS)
    v_full, v_empty = make_barriers(STAGES_V, CONSUMERS)
    fence_async_shared()
    if EARLY_START:
        if SPLIT:
            gdc_launch_dependents()  # the merge may set itself up; it waits for this kernel's end
        gdc_wait()  # the kernel before this one has finished and its results are visible from here on

    # Which tile of queries: neighbouring programs share a key head. The last rows see the most keys: they start first.
    TILE: gl.constexpr = CONSUMERS * QUERIES
    most_queries = seqlen_q
    tiles_m = (seqlen_q + TILE - 1) // TILE
    tile_m, rest = gl.program_id(0) % tiles_m, gl.program_id(0) // tiles_m
    if CAUSAL:
        tile_m = tiles_m - 1 - tile_m
    first_head, rest = rest % HEAD_TILES * BLOCK_G, rest // HEAD_TILES
    batch, head_kv = rest // heads_kv, rest % heads_kv
    split = gl.program_id(1)
    before = seqlen_k if cache_seqlens is None else 0
    sequences = Sequences(
        cu_seqlens_q, cu_seqlens_k, cache_seqlens, cache_batch_idx, None, page_table, stride_table, seqlen_q, seqlen_k,
        before, 0,
    )  # fmt: skip
    # Of sequences of many lengths the longest start first, and the short ones fill the end (Graham 1969).
    if BATCHES > 0:
        batch = _nth_longest(sequences, batch, batches, BATCHES)
        rest = batch * heads_kv + head_kv
    batch_q = batch if cu_seqlens_q is None else 0
    batch_k = batch if cu_seqlens_k is None else 0
    first_q, seqlen_q = packed_rows(cu_seqlens_q, batch, seqlen_q)
    first_k, seqlen_k, _ = keys_of(sequences, batch)
    if not SPLIT and cu_seqlens_q is not None:
        pair, dim = rest_lanes(v_desc.block_type.shape[3] * (1 if v_rest is None else 2))  # of two parts the first is wider
        heads = heads_kv * GROUP
        write_rest(out_base, lse_base, stride_oh, stride_om, cu_seqlens_q, batches, stride_lse, heads, pair, dim, DV)
    if cache_batch_idx is not None:
        batch_k = gl.load(cache_batch_idx + batch)

    # Which keys: the tiles [low, high), those of a split where they are split; a tile that pads an unrolled few is hidden.
    first_row = tile_m * TILE
    diagonal = seqlen_k - seqlen_q
    if TOPLEFT:
        diagonal = gl.to_tensor(0)
    if right is not None:
        diagonal += right
    end = seqlen_k
    if CAUSAL:
        end = gl.minimum(end, gl.minimum(first_row + TILE, seqlen_q) + diagonal)
    tiles = (gl.maximum(end, 0) + BLOCK_N - 1) // BLOCK_N
    low = gl.to_tensor(0)
    if left is not None:
        low = gl.maximum(first_row + diagonal - keys_back(left, right), 0) // BLOCK_N
        tiles = gl.maximum(tiles - low, 0)
    high = low + tiles
    if SPLIT:
        used = used_splits(tiles, splits, MIN_TILES)
        high = low + gl.where(split < used, tiles * (split + 1) // used, tiles * split // used)
        low += tiles * split // used
    count = gl.where((high > low) & (first_row < seqlen_q), gl.maximum(high - low, PEELED), 0)

    batch64, head64 = batch.to(gl.int64), (head_kv * GROUP).to(gl.int64)
    in_heads = rest.to(gl.int64) * most_queries * GROUP + first_row * GROUP  # of packed rows, those of partials
    part_at = (in_heads * splits + split) * DV
    sums_at = all_rows.to(gl.int64) * splits * DV + (in_heads * splits + split) * 2
    if cu_seqlens_q is None:
        out_at = batch64 * stride_ob + head64 * stride_oh + first_row.to(gl.int64) * stride_om
        lse_at = (batch64 * heads_kv * GROUP + head64) * stride_lse + first_row
    else:
        out_at = head64 * stride_oh + (first_q + first_row).to(gl.int64) * stride_om
        lse_at = head64 * stride_lse + first_q + first_row
    if PAGE > 0:
        keys = CachePages(page_table + batch64 * stride_table, (seqlen_k + PAGE - 1) // PAGE)
    else:
        keys = CacheRows(batch_k, first_k)  # type: ignore[assignment]
    tiles_n = KeyTiles(low, high, count)
    loads = Loads(batch_q, head_kv, first_head, first_q + first_row, keys, tiles_n)
    rows = Rows(tiles_n, first_head, first_row, seqlen_q, seqlen_k, diagonal, left, right)
    if sinks is not None:
        sinks += head_kv * GROUP
    output = Output(
        out_base, lse_base, partials, sinks, out_at, lse_at, part_at, sums_at, stride_oh, stride_om, stride_lse, splits
    )  # fmt: skip
    buffers = Buffers(q_smem, k_smem, v_smem)
    barriers = Barriers(q_full, None, k_full, k_empty, v_full, v_empty)
    scales = Scales(softmax_scale * 1.4426950408889634, softcap)
    if softcap is not None:
        scales = capped_scales(softmax_scale, softcap)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, (buffers, barriers, rows, output, scales, 0, TRAITS)),
                (produce, (descs, buffers, barriers, loads, TRAITS)),
            ],
            [1], [PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (buffers, barriers, rows, output, scales, 0, TRAITS)),
                (consume, (buffers, barriers, rows, output, scales, 1, TRAITS)),
                (produce, (descs, buffers, barriers, loads, TRAITS)),
            ],
            [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
        )


def plan(inputs: AttentionInputs, config: Config) -> ChunkLauncher:
    return ChunkLauncher(flashmoe_chunk_gluon_sm90, inputs, config)


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    work = work_in(problem, config)
    splits = splits_for(work, config, gpu)
    main = Launch(f"^{flashmoe_chunk_gluon_sm90.__name__}$", (work.heads * work.tiles_m, splits, 1), threads(config))
    rows = problem.batch * problem.heads * problem.seqlen_q
    merge_grid = (chunk_merge.programs(rows, problem.head_dim_v), 1, 1)
    merge = Launch(f"^{chunk_merge.flashmoe_chunk_merge.__name__}$", merge_grid, 32 * chunk_merge.WARPS)
    return (main,) if splits == 1 else (main, merge)


KERNEL = our_kernel(
    name=NAME,
    about="warp-specialised Gluon for Hopper for few queries of many keys: packed query heads, keys split over programs",
    supports=supports,
    configs=configs,
    run=run_planned(plan),
    launches=launches,
    plan=plan,
    workspace=workspace,
    suits=suits,
)
