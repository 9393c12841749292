"""Attention of a few packed rows over many keys, in Gluon: decoding, where latency counts as much as bandwidth.

Shapes (see problem/features.py): Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv], or a cache of keys and values,
contiguous or in pages, with its lengths on the device -> O [B, H, Sq, Dv] and LSE [B, H, Sq]. fp16 and bf16; D and Dv
multiples of 8 up to 128; at most 16 packed rows (queries times heads that share a key head); sm_80 and up.

A program has all rows of a sequence and key head and a contiguous split of the keys (decode_split.py), as one of split_triton
has, and leaves the same partials to the same merge; stream-K and the LPT order are by the same functions. Q and the first tiles
of K and V are copied to shared memory at once: keys do not wait for Q, as they do where Triton's compiler orders the loads. The
keys of a tile are parted among the warps, which are the first dimension of both products: warps reduce independently and
combine once at the end.

Splitting the keys: Dao et al. 2023 (Flash-Decoding), here over programs and over warps. Online softmax: Milakov and Gimelshein
2018. Copies past registers: cp.async of PTX ISA 7.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu, why_no_triton
from flashmoe_science.kernel import CannotServe, Config, Device, Launch
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, our_kernel, run_planned
from flashmoe_science.ops.attention.device.partials import Partials
from flashmoe_science.ops.attention.device.ranges import (
    sequence_by_length,
    sequences_in,
    store_split_info,
    tiles_of,
    use_stream_k,
)
from flashmoe_science.ops.attention.device.sequences import Sequences
from flashmoe_science.ops.attention.device.tma import check_copied, why_not_in_copies
from flashmoe_science.ops.attention.forward.splitkv import kernel as split_triton
from flashmoe_science.ops.attention.forward.splitkv.config import PAGED_KEYS, Variant, config_of, shared_bytes, suits, workspace
from flashmoe_science.ops.attention.forward.splitkv.decode_split import attend_split
from flashmoe_science.ops.attention.forward.splitkv.launch import SplitLauncher
from flashmoe_science.ops.attention.forward.splitkv.records import Operands, Scores, Split, Strided, Traits
from flashmoe_science.ops.attention.problem import AttentionProblem, padded_head_dim
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.gluon_bridge import barrier

NAME = "decode_gluon"
MAX_WIDTH, MAX_ROWS = 128, 16


@gluon.jit(do_not_specialize=split_triton.SIZES)
def flashmoe_decode_gluon(
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
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MIN_TILES: gl.constexpr, SPLIT: gl.constexpr,
    STREAM_K: gl.constexpr, LPT_ORDER: gl.constexpr, BATCHES: gl.constexpr,
    PAGE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, ENDS: gl.constexpr, WARPS: gl.constexpr,
    EARLY_START: gl.constexpr,
):  # fmt: skip
    """Attend the rows of a sequence and key head to the program's split of its keys, or of several sequences to those of its
    range. The arguments are those of ``flashmoe_split_triton``, so that one launcher serves both; those of features that are
    not served here are not read."""
    # Rows begin at 16 bytes: so that the compiler sees it.
    stride_qb, stride_qh, stride_qm = (stride_qb >> 3) * 8, (stride_qh >> 3) * 8, (stride_qm >> 3) * 8
    stride_kb, stride_kh, stride_kn = (stride_kb >> 3) * 8, (stride_kh >> 3) * 8, (stride_kn >> 3) * 8
    stride_vb, stride_vh, stride_vn = (stride_vb >> 3) * 8, (stride_vh >> 3) * 8, (stride_vn >> 3) * 8
    if EARLY_START:
        if SPLIT and not STREAM_K:
            gdc_launch_dependents()  # the merge may set itself up; it waits for this kernel's end
        gdc_wait()  # the kernel before this one has finished and its results are visible from here on
        if STREAM_K:
            gdc_launch_dependents()  # not before: the merge reads lengths as it starts
    operands = Operands(
        Strided(q_base, stride_qb, stride_qh, stride_qm), Strided(k_base, stride_kb, stride_kh, stride_kn),
        Strided(v_base, stride_vb, stride_vh, stride_vn), Strided(out_base, stride_ob, stride_oh, stride_om),
        lse_base, stride_lse, heads_kv,
    )  # fmt: skip
    sequences = Sequences(
        None, None, cache_seqlens, cache_batch_idx, leftpads, page_table, stride_table, seqlen_q, seqlen_k, before, 0
    )  # fmt: skip
    scores = Scores(softmax_scale, left, right, sinks)
    traits: gl.constexpr = Traits(
        GROUP, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, STAGES, MIN_TILES, PAGE,
        LEFT, RIGHT, LEFT or leftpads is not None, ENDS, WARPS,
    )  # fmt: skip
    number, head_kv, split = gl.program_id(0) // heads_kv, gl.program_id(0) % heads_kv, gl.program_id(1)
    batch = number
    if BATCHES > 0:
        batch, split = number // splits, number % splits
    stream_k = False
    if STREAM_K:
        numbers = gl.arange(0, BATCHES, gl.BlockedLayout([1], [32], [WARPS], [0]))
        tiles = tiles_of(sequences, numbers, batches, BLOCK_N, True)  # [BATCHES]
        stream_k, total = use_stream_k(tiles, even_slope, even_least)  # all programs see the same lengths and decide alike
    if LPT_ORDER:
        if stream_k == 0:  # the splits of the longest sequence start first, those of the shortest fill the last wave
            pairs: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
            row, column = gl.arange(0, BATCHES, gl.SliceLayout(1, pairs)), gl.arange(0, BATCHES, gl.SliceLayout(0, pairs))
            batch = sequence_by_length(cache_seqlens, batch, batches, row, column)
    if not STREAM_K:
        results = Partials(partials, all_rows, splits)
        own = Split(split, splits, batch * heads_kv + head_kv, split)
        attend_split(batch, head_kv, own, None, operands, sequences, scores, results, SPLIT, traits)
    else:
        # Splits may be of any sequence: partials have slots for all, of each of the rows of a key head.
        results = Partials(partials, all_rows, gl.maximum(batches * splits, batches + ranges))
        first, past, begin, low, high, units = batch, gl.minimum(batch + 1, batches), 0, 0, 0, 1
        if stream_k:
            first, past, begin, low, high, units = sequences_in(tiles, total, number, ranges, batches, numbers, MIN_TILES)
        for sequence in range(first, past):
            tiles_in = tiles_of(sequences, sequence, batches, BLOCK_N, True)
            low_tile, high_tile = low - begin - MIN_TILES, high - begin - MIN_TILES
            begin += MIN_TILES + tiles_in
            if stream_k & (head_kv == 0) & (low_tile < 2 * MIN_TILES):  # the sequence's first split
                store_split_info(results, sequence, number, begin, ranges, units, DV, MIN_TILES)
            slot = gl.where(stream_k, sequence + number, sequence * splits + split)
            own = Split(split, splits, head_kv, slot, tiles_in, low_tile, high_tile)
            attend_split(sequence, head_kv, own, stream_k, operands, sequences, scores, results, SPLIT, traits)
            barrier()  # the next split takes this one's shared memory


def supports(problem: AttentionProblem, device: Device) -> str | None:
    """None if the kernel can serve the problem there, else why not."""
    if reason := unsupported(problem.features, ("ragged", "page", "leftpad", "sinks", "window")) or why_no_triton(device):
        return reason
    if reason := why_not_in_copies(problem):
        return reason
    if problem.mask == "causal-topleft":
        return "aligns its causal mask bottom-right"
    if (width := max(problem.head_dim, problem.head_dim_v)) > MAX_WIDTH:
        return f"serves heads of up to {MAX_WIDTH}, not {width}"
    if (rows := problem.seqlen_q * problem.heads // problem.heads_kv) > MAX_ROWS:
        return f"serves up to {MAX_ROWS} rows (queries times heads that share a key head), not {rows}"
    return None


def configs(problem: AttentionProblem, device: Device) -> tuple[Config, ...]:
    """Tiles that fit the GPU's shared memory, the best guess first: a program with many bytes on their way fills an SM alone.
    Where keys are in pages two programs share one, so that while one waits for the numbers of its pages the other reads.
    ``num_stages`` counts as Triton does: tiles in shared memory are one fewer."""
    limit = 99 * 1024 if device is None else device.shared_per_block
    widths = (padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    wide, narrow, short, pair = (MAX_ROWS, 128, 4, 3), (MAX_ROWS, 32, 2, 4), (MAX_ROWS, 64, 4, 3), (MAX_ROWS, 64, 4, 4)
    first = (wide, narrow)
    if problem.features.page and max(widths) > 64:
        many = problem.batch * problem.heads_kv * problem.seqlen_k > PAGED_KEYS
        first = (pair, wide) if many else (short, wide if problem.features.page >= 64 else narrow)
    tiles = dict.fromkeys((*first, narrow, short, (MAX_ROWS, 64, 4, 5), pair, wide, (MAX_ROWS, 128, 4, 4)))
    return tuple(config_of(tile) for tile in tiles if shared_bytes(tile, *widths, 2, 2, tile[3] - 1) <= limit)


class DecodeLauncher(SplitLauncher):
    """``SplitLauncher`` for this kernel, which needs rows in steps of 16 bytes."""

    def __init__(self, inputs: AttentionInputs, config: Config) -> None:
        check_copied(inputs)
        super().__init__(flashmoe_decode_gluon, inputs, config)

    def _constexprs(self, variant: Variant, strides: tuple[float, ...]) -> dict[str, Any]:
        """The constexprs that it shares with split_triton, and its own, in its order. Raises CannotServe."""
        if any(one is not None for one in variant.new_pointers):
            raise CannotServe("appends to a cache are split_triton's")
        if variant.wide:
            raise CannotServe("rows of a tile are 2^30 elements apart")
        if any(stride % 8 for stride in strides):
            raise CannotServe(f"a stride of {next(one for one in strides if one % 8)}; its copies need multiples of 8")
        every, config = super()._constexprs(variant, strides), self._config
        every |= {"STAGES": config["num_stages"] - 1, "WARPS": config["num_warps"]}
        return {name: every[name] for name in flashmoe_decode_gluon.arg_names if name in every}


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    main, *merge = split_triton.launches(problem, config, gpu)
    return (replace(main, name=f"^{flashmoe_decode_gluon.__name__}$"), *merge)


KERNEL = our_kernel(
    name=NAME,
    about="decoding: few rows over many keys, all copies on their way at once, keys parted among the warps; sm_80 and up",
    supports=supports,
    configs=configs,
    run=run_planned(DecodeLauncher),
    launches=launches,
    plan=DecodeLauncher,
    workspace=workspace,
    suits=suits,
)
