"""Attention of every serving mode in portable Triton: packed query heads, keys split over programs, partials merged in order.

Shapes (see problem/features.py): Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv] -> O [B, H, Sq, Dv] and
LSE [B, H, Sq]; or a cache of keys and values, contiguous or in pages, with its lengths on the device; or packed queries. fp16,
bf16 and fp32, an e4m3 cache with 16-bit queries; D and Dv from 1 to 256; sm_80 and up.

A program has a tile of packed rows of one sequence and one key head: row r is query r // group of head r % group among those
that share the key head, so that K and V are read once for all of them. It walks a contiguous split of the keys that its rows
see (split.py; one tile of keys: tile.py). Where keys are split, each program stores its running maximum, its sum and its
unscaled output in fp32 (device/partials.py), and ``flashmoe_merge_triton`` adds them in the order of the splits: equal calls
give equal bits. Nothing waits for the host: grids come from the longest query and the capacity, and programs without work exit,
so that a graph captured at some lengths serves others.
Where lengths are on the device alone, each program reads all of them (device/ranges.py): in several waves the longest
sequences start first (LPT order), and where one of many keys is much longer than the others, programs take equal ranges of the
keys of all (stream-K).

Splitting the keys: Dao et al. 2023 (Flash-Decoding). Online softmax: Milakov and Gimelshein 2018.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, our_kernel, run_planned
from flashmoe_science.ops.attention.device.merge_triton import flashmoe_merge_triton, merge_grid, merge_warps
from flashmoe_science.ops.attention.device.partials import Partials
from flashmoe_science.ops.attention.device.ranges import (
    sequence_by_length,
    sequences_in,
    store_split_info,
    tiles_of,
    use_stream_k,
)
from flashmoe_science.ops.attention.device.rotary import RotaryTables
from flashmoe_science.ops.attention.device.sequences import Sequences, write_rest
from flashmoe_science.ops.attention.forward.splitkv.config import (
    configs,
    main_grid,
    splits_in,
    suits,
    supports,
    workspace,
)
from flashmoe_science.ops.attention.forward.splitkv.launch import SplitLauncher
from flashmoe_science.ops.attention.forward.splitkv.records import New, Operands, Scores, Split, Strided, Traits
from flashmoe_science.ops.attention.forward.splitkv.split import attend_split
from flashmoe_science.ops.attention.problem import AttentionProblem

NAME = "split_triton"
# Not specialised on: a new batch, length or window must not compile anew.
SIZES = (
    "heads_kv", "seqlen_q", "seqlen_k", "splits", "ranges", "batches", "even_slope", "even_least", "left", "right", "all_rows",
    "stride_lse", "stride_table", "stride_slopes", "stride_ks_b", "stride_ks_h", "stride_vs_b", "stride_vs_h", "before", "new",
    "caches", "positions", "stride_cos",
)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def flashmoe_split_triton(
    q_base, k_base, v_base, out_base, lse_base, partials,
    cu_seqlens_q, cu_seqlens_k, cache_seqlens, page_table, cache_batch_idx, leftpads,
    sinks, slopes, bias, prefixes, k_scales, v_scales, new_ks, new_vs, cos, sin, rotary_seqlens, softmax_scale, softcap,
    before, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, seqlen_k,
    stride_qb, stride_qh, stride_qm, stride_ob, stride_oh, stride_om,
    stride_lse, stride_table, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n,
    stride_ks_b, stride_ks_h, stride_vs_b, stride_vs_h,
    stride_nkb, stride_nkh, stride_nkn, stride_nvb, stride_nvh, stride_nvn,
    heads_kv, seqlen_q, splits, ranges, batches, even_slope, even_least, left, right, all_rows,
    new, caches, positions, stride_cos,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, MIN_TILES: tl.constexpr,
    ONE_TILE: tl.constexpr, SPLIT: tl.constexpr, STREAM_K: tl.constexpr, LPT_ORDER: tl.constexpr, BATCHES: tl.constexpr,
    PAGE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, TOPLEFT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    ENDS: tl.constexpr, ALWAYS: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    COMPENSATED: tl.constexpr, SCALE_FIRST: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    EARLY_START: tl.constexpr, BLOCK_NEW: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, MOVING: tl.constexpr,
):  # fmt: skip
    """Attend a tile of packed rows of a sequence and key head to the program's split of its keys, or with stream-K those of
    several sequences to the program's range of theirs."""
    if UNIT > 1:  # see stride_unit
        stride_qb, stride_qh, stride_qm = stride_qb // UNIT * UNIT, stride_qh // UNIT * UNIT, stride_qm // UNIT * UNIT
        stride_kb, stride_kh, stride_kn = stride_kb // UNIT * UNIT, stride_kh // UNIT * UNIT, stride_kn // UNIT * UNIT
        stride_vb, stride_vh, stride_vn = stride_vb // UNIT * UNIT, stride_vh // UNIT * UNIT, stride_vn // UNIT * UNIT
        stride_ob, stride_oh, stride_om = stride_ob // UNIT * UNIT, stride_oh // UNIT * UNIT, stride_om // UNIT * UNIT
    tile_m, rest = 0, tl.program_id(0)
    if not ONE_TILE:
        tiles_m = tl.cdiv(seqlen_q * GROUP, BLOCK_M)
        tile_m, rest = rest % tiles_m, rest // tiles_m
        if RIGHT:  # the last rows see the most keys: start them first
            tile_m = tiles_m - 1 - tile_m
    split = tl.program_id(1)
    if EARLY_START:
        if SPLIT and not STREAM_K:
            gdc_launch_dependents()  # the merge may set itself up; it waits for this kernel's end
        gdc_wait()  # the kernel before this one has finished and its results are visible from here on
        if STREAM_K:
            gdc_launch_dependents()  # not before: the merge reads lengths as it starts
    batch, head_kv = rest // heads_kv, rest % heads_kv
    if BATCHES > 0:  # one tile of rows, and a grid of one dimension
        number = batch
        batch, split = number // splits, number % splits
    scores = Scores(
        softmax_scale, left, right, sinks, softcap, Strided(slopes, stride_slopes, None),
        Strided(bias, stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n), prefixes,
        Strided(k_scales, stride_ks_b, stride_ks_h), Strided(v_scales, stride_vs_b, stride_vs_h),
    )  # fmt: skip
    operands = Operands(
        Strided(q_base, stride_qb, stride_qh, stride_qm), Strided(k_base, stride_kb, stride_kh, stride_kn),
        Strided(v_base, stride_vb, stride_vh, stride_vn), Strided(out_base, stride_ob, stride_oh, stride_om),
        lse_base, stride_lse, heads_kv,
    )  # fmt: skip
    sequences = Sequences(
        cu_seqlens_q, cu_seqlens_k, cache_seqlens, cache_batch_idx, leftpads, page_table, stride_table, seqlen_q, seqlen_k,
        before, new,
    )  # fmt: skip
    appended = New(
        Strided(new_ks, stride_nkb, stride_nkh, stride_nkn), Strided(new_vs, stride_nvb, stride_nvh, stride_nvn),
        caches, RotaryTables(cos, sin, rotary_seqlens, positions, stride_cos),
    )  # fmt: skip
    traits: tl.constexpr = Traits(
        GROUP, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, NUM_STAGES, MIN_TILES, PAGE,
        LEFT, RIGHT, LEFT or leftpads is not None, ENDS, None, prefixes is not None, TOPLEFT, SOFTCAP, BIAS, ALWAYS, WIDE,
        COMPENSATED, SCALE_FIRST, PRECISION, INTERPRET, BLOCK_NEW, HALF, INTERLEAVED, MOVING,
    )  # fmt: skip
    stream_k, slots = False, splits
    if STREAM_K:
        # Splits may be of any sequence: partials have slots for all, of each of the rows of a key head.
        slots = tl.maximum(batches * splits, batches + ranges)
        tiles = tiles_of(sequences, tl.arange(0, BATCHES), batches, BLOCK_N, True)  # [BATCHES]
        stream_k, total = use_stream_k(tiles, even_slope, even_least)  # all programs see the same lengths and decide alike
    results = Partials(partials, all_rows, slots)
    if stream_k == 0:  # first, so that its code follows at once
        if STREAM_K:
            if batch >= batches:
                return
        if LPT_ORDER:  # the splits of the longest sequence start first, those of the shortest fill the last wave
            numbers = tl.arange(0, BATCHES)
            batch = sequence_by_length(cache_seqlens, batch, batches, numbers, numbers)
        row, slot = batch * heads_kv + head_kv, split
        if STREAM_K:
            row, slot = head_kv, batch * splits + split
        own = Split(split, splits, row, slot)
        attend_split(batch, head_kv, tile_m, own, operands, sequences, scores, appended, results, SPLIT, traits)
        if cu_seqlens_q is not None:  # at the end: before the loop over keys it made Triton 3.6's assembler spill on sm_86
            if partials is None:  # no merge follows
                pair, dim, heads = tl.arange(0, 256 // BLOCK_DV), tl.arange(0, BLOCK_DV), heads_kv * GROUP
                write_rest(out_base, lse_base, stride_oh, stride_om, cu_seqlens_q, batches, stride_lse, heads, pair, dim, DV)
        return
    if STREAM_K:
        first, past, begin, low, high, units = sequences_in(
            tiles, total, number, ranges, batches, tl.arange(0, BATCHES), MIN_TILES
        )  # fmt: skip
        for sequence in range(first, past):
            tiles_in = tiles_of(sequences, sequence, batches, BLOCK_N, True)
            low_tile, high_tile = low - begin - MIN_TILES, high - begin - MIN_TILES
            begin += MIN_TILES + tiles_in
            if (head_kv == 0) & (low_tile < 2 * MIN_TILES):  # the sequence's first split
                store_split_info(results, sequence, number, begin, ranges, units, DV, MIN_TILES)
            own = Split(0, splits, head_kv, sequence + number, tiles_in, low_tile, high_tile)
            attend_split(sequence, head_kv, 0, own, operands, sequences, scores, appended, results, True, traits)


def plan(inputs: AttentionInputs, config: Config) -> SplitLauncher:
    return SplitLauncher(flashmoe_split_triton, inputs, config)


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    work, chosen = splits_in(problem, config, gpu.sm_count)
    grid = main_grid(chosen, work.heads * work.tiles_m, problem.batch)
    main = Launch(f"^{flashmoe_split_triton.__name__}$", grid, 32 * config["num_warps"])
    rows = problem.batch * problem.heads * problem.seqlen_q
    warps = merge_warps(rows, gpu.sm_count)
    merge = Launch(f"^{flashmoe_merge_triton.__name__}$", merge_grid(rows, problem.head_dim_v, warps), 32 * warps)
    return (main, merge) if chosen.splits > 1 or chosen.ranges else (main,)


KERNEL = our_kernel(
    name=NAME,
    about="portable Triton for serving: packed query heads, keys split over programs, caches, windows, masks",
    supports=supports,
    configs=configs,
    run=run_planned(plan),
    launches=launches,
    plan=plan,
    workspace=workspace,
    suits=suits,
    interpretable=True,
)
