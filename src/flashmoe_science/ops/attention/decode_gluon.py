"""Attention of a few packed rows over many keys, in Gluon: decoding, where latency counts as much as bandwidth.

Shapes: as ops/attention/modes.py says. Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv], or a cache of keys and values,
contiguous or in pages, with its lengths on the device -> O [B, H, Sq, Dv] and LSE [B, H, Sq]. fp16 and bf16; D and Dv
multiples of 8 up to 128; at most 16 packed rows (queries times heads that share a key head); sm_80 and up.

A program has all rows of a sequence and key head and a contiguous piece of the keys, as one of split_triton.py has, and leaves
the same partials to the same merge. Q and the first tiles of K and V are copied to shared memory at once: keys do not wait for
Q, as they do where Triton's compiler orders the loads. The keys of a tile are dealt out to the warps, which are the first
dimension of both products: a warp has a maximum, a sum and an output of its own, and asks no other before the end.

Splitting the keys: Dao et al. 2023 (Flash-Decoding), here over programs and over warps. Online softmax: Milakov and Gimelshein
2018. Copies past registers: cp.async of PTX ISA 7.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu, why_no_triton
from flashmoe_science.kernel import CannotServe, CompileJob, Config, Device, Launch
from flashmoe_science.ops.attention import split_configs, split_triton
from flashmoe_science.ops.attention.copies import check_copied, why_not_in_copies
from flashmoe_science.ops.attention.hopper_gluon import log2_of_sum, with_sink
from flashmoe_science.ops.attention.inputs import AttentionInputs, AttentionKernel, AttentionOutput
from flashmoe_science.ops.attention.modes import unserved
from flashmoe_science.ops.attention.problem import AttentionProblem, padded_head_dim
from flashmoe_science.ops.attention.split_configs import (
    Variant,
    config_of,
    min_tiles,
    shared_bytes,
    splits_in,
    uneven_of,
    workspace,
)
from flashmoe_science.ops.attention.split_launcher import SplitLauncher
from flashmoe_science.ops.attention.warps_gluon import copied_columns, copied_keys, sum_of_warps, swizzled
from flashmoe_science.ops.gluon_bridge import cp_async

NAME = "decode_gluon"
MOST_WIDTH, MOST_ROWS = 128, 16
_NOT_IN_TURNS = "sequences of many keys take turns by their lengths, which this kernel does not know"


@gluon.jit
def _inside(key, start, end, BEGINS: gl.constexpr):
    """Whether keys lie from ``start`` to before ``end``. BEGINS: whether ``start`` may be past 0."""
    inside = key < end
    if BEGINS:
        inside = inside & (key >= start)
    return inside


@gluon.jit
def _pages(
    table, first_key, start, end, PAGE: gl.constexpr, WARPS: gl.constexpr, OWN: gl.constexpr, WIDTH: gl.constexpr,
    BEGINS: gl.constexpr,
):  # fmt: skip
    """The pages of a tile's keys: one, or each key's. An entry past the length is never read: it may be anything."""
    if PAGE == 0:
        return first_key
    elif PAGE % (WARPS * OWN) == 0:
        page = first_key * 0
        if first_key < end:
            page = gl.load(table + first_key // PAGE)
        return page
    else:
        key = first_key + copied_keys(WARPS, OWN, WIDTH)
        return gl.load(table + key // PAGE, mask=_inside(key, start, end, BEGINS), other=0)


@gluon.jit
def _start_copy(
    smem, head, page, first_key, start, end, stride_page, stride_row,
    D: gl.constexpr, PAGE: gl.constexpr, BEGINS: gl.constexpr,
):  # fmt: skip
    """Start copies of a tile of K or V, [warps, keys of a warp, width]: of the keys from ``start`` to before ``end``; zeros
    elsewhere, and past the head's own ``D`` columns."""
    WARPS: gl.constexpr = smem.shape[0]
    OWN: gl.constexpr = smem.shape[1]
    WIDTH: gl.constexpr = smem.shape[2]
    place, column = copied_keys(WARPS, OWN, WIDTH), copied_columns(WARPS, WIDTH)
    key = first_key + place
    inside = _inside(key, start, end, BEGINS)
    if PAGE % (WARPS * OWN) == 0:
        if PAGE == 0:
            first_row = first_key.to(gl.int64) * stride_row
        else:
            first_row = page.to(gl.int64) * stride_page + (first_key % PAGE).to(gl.int64) * stride_row
        # Unsigned: to extend signed offsets to 64 bits takes three times the instructions, for which the first copies wait.
        offsets = (gl.expand_dims(place * stride_row, 2) + column).to(gl.uint32).to(gl.int64)
        pointers = head + first_row + offsets
    else:
        rows = page.to(gl.int64) * stride_page + key % PAGE * stride_row
        pointers = head + gl.expand_dims(rows, 2) + column
    if D == WIDTH:
        cp_async(smem, pointers, mask=gl.expand_dims(inside, 2))
    else:
        cp_async(smem, pointers, mask=gl.expand_dims(inside, 2) & (column < D))
    async_copy.commit_group()


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
    PAGE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, ENDS: gl.constexpr, WARPS: gl.constexpr,
    EARLY_START: gl.constexpr,
):  # fmt: skip
    """Attend the rows of a sequence and key head to the piece of its keys that is the program's. The arguments are those of
    ``flashmoe_split_triton``, so that one launcher serves both; what modes that are not served here would bring is not read."""
    # Rows begin at 16 bytes, which the compiler is told so.
    stride_qb, stride_qh, stride_qm = (stride_qb >> 3) * 8, (stride_qh >> 3) * 8, (stride_qm >> 3) * 8
    stride_kb, stride_kh, stride_kn = (stride_kb >> 3) * 8, (stride_kh >> 3) * 8, (stride_kn >> 3) * 8
    stride_vb, stride_vh, stride_vn = (stride_vb >> 3) * 8, (stride_vh >> 3) * 8, (stride_vn >> 3) * 8
    dtype: gl.constexpr = q_base.dtype.element_ty
    OWN: gl.constexpr = BLOCK_N // WARPS
    BEGINS: gl.constexpr = LEFT or leftpads is not None
    MASKED: gl.constexpr = ENDS or BEGINS or RIGHT
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], swizzled(BLOCK_D, [1, 0]))
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, WARPS, OWN, BLOCK_D], swizzled(BLOCK_D, [2, 1, 0]))
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, WARPS, OWN, BLOCK_DV], swizzled(BLOCK_DV, [2, 1, 0]))
    batch, head_kv, split = gl.program_id(0) // heads_kv, gl.program_id(0) % heads_kv, gl.program_id(1)
    batch64, head_kv64 = batch.to(gl.int64), head_kv.to(gl.int64)

    ACROSS: gl.constexpr = BLOCK_D // 8
    of_q: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, of_q)), 1)
    column = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(0, of_q)), 0)
    q_tile = q_base + batch64 * stride_qb + head_kv64 * GROUP * stride_qh
    if EARLY_START:
        if SPLIT:
            gdc_launch_dependents()  # the merge may set itself up; it waits for this kernel's end
        gdc_wait()  # the kernel before this one has finished and its results are visible from here on
    cp_async(
        q_smem, q_tile + (row % GROUP) * stride_qh + (row // GROUP) * stride_qm + column,
        mask=(row < seqlen_q * GROUP) & (column < D),
    )  # fmt: skip
    async_copy.commit_group()
    if cache_seqlens is not None:
        seqlen_k = gl.minimum(before + gl.load(cache_seqlens + batch), seqlen_k)  # never past the capacity
    else:
        seqlen_k = gl.minimum(before, seqlen_k)

    # The keys that some row sees, [start, end).
    diagonal = seqlen_k - seqlen_q
    start, end = 0, seqlen_k
    if leftpads is not None:
        start = gl.maximum(gl.load(leftpads + batch), 0)
    if RIGHT:
        end = gl.minimum(end, seqlen_q + diagonal + right)
    if LEFT:
        start = gl.maximum(start, diagonal - left)
    end = gl.maximum(end, start)
    first_tile = start // BLOCK_N
    tiles = gl.cdiv(end, BLOCK_N) - first_tile
    if BEGINS:
        tiles = gl.where(end > start, tiles, 0)
    low, high = first_tile, first_tile + tiles
    if SPLIT:
        used = gl.maximum(gl.minimum(splits, gl.cdiv(tiles, MIN_TILES)), 1)
        each = tiles // used
        more = tiles - each * used  # pieces that have one tile more
        low = gl.minimum(first_tile + each * split + gl.minimum(split, more), first_tile + tiles)
        high = gl.where(split < used, low + each + (split < more).to(gl.int32), low)
    k_head, v_head = k_base + head_kv64 * stride_kh, v_base + head_kv64 * stride_vh
    table = None
    if PAGE == 0:
        cached = batch64
        if cache_batch_idx is not None:
            cached = gl.load(cache_batch_idx + batch).to(gl.int64)
        k_head += cached * stride_kb
        v_head += cached * stride_vb
    else:
        table = page_table + batch64 * stride_table
    top = gl.minimum(end, high * BLOCK_N)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left_operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right_operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    scale_log2 = softmax_scale * 1.4426950408889634
    of_row: gl.constexpr = gl.SliceLayout(2, mma)
    row_max = gl.full([WARPS, BLOCK_M], float("-inf"), gl.float32, of_row)
    row_sum = gl.zeros([WARPS, BLOCK_M], gl.float32, of_row)
    acc = gl.zeros([WARPS, BLOCK_M, BLOCK_DV], gl.float32, mma)
    warp = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, of_row)), 1)
    own_key = gl.expand_dims(gl.expand_dims(gl.arange(0, OWN, gl.SliceLayout(0, gl.SliceLayout(1, mma))), 0), 1)
    offset = gl.expand_dims(warp, 2) * OWN + own_key
    query = gl.expand_dims(gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, of_row)) // GROUP, 0), 2)
    pages_k = _pages(table, low * BLOCK_N, start, top, PAGE, WARPS, OWN, BLOCK_D, BEGINS)
    pages_v = _pages(table, low * BLOCK_N, start, top, PAGE, WARPS, OWN, BLOCK_DV, BEGINS)
    # The first rounds only start copies: the code of a second loop for them would be read from memory as they wait.
    for coming in range(low, high + STAGES - 1):
        slot = (coming - low) % STAGES
        first_coming = coming * BLOCK_N
        _start_copy(k_smem.index(slot), k_head, pages_k, first_coming, start, top, stride_kb, stride_kn, D, PAGE, BEGINS)
        _start_copy(v_smem.index(slot), v_head, pages_v, first_coming, start, top, stride_vb, stride_vn, DV, PAGE, BEGINS)
        if PAGE > 0:  # of the next tile, to be there when its copies start
            pages_k = _pages(table, first_coming + BLOCK_N, start, top, PAGE, WARPS, OWN, BLOCK_D, BEGINS)
            pages_v = _pages(table, first_coming + BLOCK_N, start, top, PAGE, WARPS, OWN, BLOCK_DV, BEGINS)
        number = coming - (STAGES - 1)
        if number >= low:
            slot = (number - low) % STAGES
            async_copy.wait_group(2 * STAGES - 1)
            q = gl.expand_dims(q_smem.load(gl.SliceLayout(0, left_operand)), 0)
            q, same = gl.broadcast(q, gl.zeros([WARPS, BLOCK_M, BLOCK_D], dtype, left_operand))
            k = k_smem.index(slot).permute((0, 2, 1)).load(right_operand)
            s = mma_v2(q, k, gl.zeros([WARPS, BLOCK_M, OWN], gl.float32, mma))
            if MASKED:
                key = number * BLOCK_N + offset
                seen = key < end
                if RIGHT:
                    seen = seen & (key <= query + diagonal + right)
                if BEGINS:
                    seen = seen & (key >= start)
                if LEFT:
                    seen = seen & (key >= query + diagonal - left)
                s = gl.where(seen, s, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(s, 2) * scale_log2)
            # A row that has seen no key has a maximum of -inf; subtracting 0 instead keeps exp2(-inf) = 0 rather than NaN.
            shift = gl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = gl.exp2(row_max - shift)
            p = gl.exp2(s * scale_log2 - gl.expand_dims(shift, 2))
            row_sum = row_sum * rescale + gl.sum(p, 2)
            row_max = new_max
            acc = acc * gl.expand_dims(rescale, 2)
            async_copy.wait_group(2 * STAGES - 2)
            v = v_smem.index(slot).load(right_operand)
            acc = mma_v2(gl.convert_layout(p.to(dtype), left_operand), v, acc)
    async_copy.wait_group(0)

    row_max, row_sum, acc = sum_of_warps(acc, row_max, row_sum)
    of_out: gl.constexpr = acc.type.layout
    rows = gl.arange(0, BLOCK_M, row_max.type.layout)
    row = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, of_out)), 1)
    column = gl.expand_dims(gl.arange(0, BLOCK_DV, gl.SliceLayout(0, of_out)), 0)
    most_rows = seqlen_q * GROUP
    given = (row < most_rows) & (column < DV)
    if SPLIT:
        first_in_all = (batch * heads_kv + head_kv) * most_rows.to(gl.int64) * splits + split
        sums = partials + all_rows.to(gl.int64) * splits * DV + 2 * first_in_all
        gl.store(partials + first_in_all * DV + row * (splits * DV) + column, acc, mask=given)
        gl.store(sums + 2 * splits * rows, row_max, mask=rows < most_rows)
        gl.store(sums + 2 * splits * rows + 1, row_sum, mask=rows < most_rows)
    else:
        if sinks is not None:
            sink = gl.load(sinks + head_kv * GROUP + rows % GROUP)
            row_max, row_sum, rescale = with_sink(sink, row_max, row_sum)
            acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, of_out)), 1)
        # A row that sees no key has a sum of 0: its output is 0 and its log-sum-exp log(0) = -inf.
        inverse = gl.convert_layout(1.0 / gl.where(row_sum == 0.0, 1.0, row_sum), gl.SliceLayout(1, of_out))
        acc = acc * gl.expand_dims(inverse, 1)
        out_tile = out_base + batch64 * stride_ob + head_kv64 * GROUP * stride_oh
        places = (row % GROUP) * stride_oh + (row // GROUP) * stride_om
        gl.store(out_tile + places + column, acc.to(dtype), mask=given)
        if lse_base is not None:
            lse_rows = (batch64 * heads_kv * GROUP + head_kv * GROUP + rows % GROUP) * stride_lse + rows // GROUP
            shift = gl.where(row_max == float("-inf"), 0.0, row_max)
            gl.store(lse_base + lse_rows, (shift + log2_of_sum(row_sum)) * 0.6931471805599453, mask=rows < most_rows)


def supports(problem: AttentionProblem, device: Device) -> str | None:
    """None if the kernel can serve the problem there, else why not."""
    if reason := unserved(problem.modes, ("ragged", "page", "leftpad", "sinks", "window")) or why_no_triton(device):
        return reason
    if reason := why_not_in_copies(problem):
        return reason
    if problem.mask == "causal-topleft":
        return "aligns its causal mask bottom-right"
    if (width := max(problem.head_dim, problem.head_dim_v)) > MOST_WIDTH:
        return f"serves heads of up to {MOST_WIDTH}, not {width}"
    if (rows := problem.seqlen_q * problem.heads // problem.heads_kv) > MOST_ROWS:
        return f"serves up to {MOST_ROWS} rows (queries times heads that share a key head), not {rows}"
    if problem.batch > 1 and uneven_of(problem):
        assert device is not None
        if splits_in(problem, configs(problem, device)[0], device.sm_count)[1].batches:
            return _NOT_IN_TURNS
    return None


def suits(problem: AttentionProblem, gpu: Gpu) -> bool:
    """What suits ``split_triton``, but for several sequences in pages or windows: no record says that this is faster there."""
    alone = problem.batch == 1 or not (problem.modes.page or problem.modes.window)
    return alone and split_configs.suits(problem, gpu)


def configs(problem: AttentionProblem, device: Device) -> tuple[Config, ...]:
    """Tiles that fit the GPU's shared memory, the best guess first: a program with many bytes on their way fills an SM alone,
    and programs of two warps wait less for the numbers of small pages. ``num_stages`` counts as Triton does: tiles in shared
    memory are one fewer."""
    limit = 99 * 1024 if device is None else device.shared_per_block
    widths = (padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    wide, narrow = (MOST_ROWS, 128, 4, 3), (MOST_ROWS, 32, 2, 4)
    first = (narrow, wide) if 0 < problem.modes.page < 64 and max(widths) > 64 else (wide, narrow)
    tiles = (*first, (MOST_ROWS, 64, 4, 5), (MOST_ROWS, 64, 4, 4), (MOST_ROWS, 64, 4, 3), (MOST_ROWS, 128, 4, 4))
    return tuple(config_of(tile) for tile in tiles if shared_bytes(tile, *widths, 2, 2, tile[3] - 1) <= limit)


def _constexprs(problem: AttentionProblem, config: Config, variant: Variant, early: bool) -> dict[str, Any]:
    return {
        "GROUP": variant.group,
        "D": problem.head_dim,
        "DV": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_M": config["block_m"],
        "BLOCK_N": config["block_n"],
        "STAGES": config["num_stages"] - 1,
        "MIN_TILES": min_tiles(config),
        "SPLIT": variant.split,
        "PAGE": problem.modes.page,
        "LEFT": problem.modes.window_left is not None,
        "RIGHT": variant.right,
        "ENDS": variant.ends,
        "WARPS": config["num_warps"],
        "EARLY_START": early,
    }


class DecodeLauncher(SplitLauncher):
    """``SplitLauncher`` for this kernel, which needs rows in steps of 16 bytes and has no order of sequences."""

    def __init__(self, inputs: AttentionInputs, config: Config) -> None:
        check_copied(inputs)
        super().__init__(flashmoe_decode_gluon, inputs, config)

    def _constexprs(self, variant: Variant, strides: tuple[float, ...]) -> dict[str, Any]:
        if variant.batches:
            raise CannotServe(_NOT_IN_TURNS)
        if any(one is not None for one in variant.new_pointers):
            raise CannotServe("appends to a cache are split_triton's")
        if variant.wide:
            raise CannotServe("rows of a tile are 2^30 elements apart")
        if any(stride % 8 for stride in strides):
            raise CannotServe(f"a stride of {next(one for one in strides if one % 8)}; its copies need multiples of 8")
        return _constexprs(self._problem, self._config, variant, self._early)


def plan(inputs: AttentionInputs, config: Config) -> DecodeLauncher:
    return DecodeLauncher(inputs, config)


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    return plan(inputs, config).bind_inputs(inputs)(inputs)


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    main, *merge = split_triton.launches(problem, config, gpu)
    return (replace(main, name=f"^{flashmoe_decode_gluon.__name__}$"), *merge)


def compile_job(problem: AttentionProblem, config: Config, gpu: Gpu) -> CompileJob:
    """Of the main kernel, whose arguments but for the constexprs are split_triton's."""
    job, variant = split_triton.compile_job(problem, config, gpu), split_triton.variant_of(problem, config, gpu)
    constexprs = _constexprs(problem, config, variant, early=gpu.compute_capability >= (9, 0))
    signature = {name: job.signature[name] for name in flashmoe_decode_gluon.arg_names if name not in constexprs}
    absent = {name: None for name, kind in signature.items() if kind == "constexpr"}
    return replace(
        job,
        function=flashmoe_decode_gluon,
        signature=signature | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs | absent,
        num_stages=1,
        gluon=True,
    )


KERNEL = AttentionKernel(
    name=NAME,
    origin="ours",
    op="attention",
    about="decoding: few rows over many keys, all copies on their way at once, keys dealt out to the warps; sm_80 and up",
    supports=supports,
    configs=configs,
    run=run,
    launches=launches,
    plan=plan,
    workspace=workspace,
    compile_job=compile_job,
    suits=suits,
)
