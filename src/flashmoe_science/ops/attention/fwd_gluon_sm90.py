"""Attention forward for Hopper in Gluon: a TMA producer warp and one to three consumer warpgroups of 64 query rows each.

Shapes: Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv] -> O [B, H, Sq, Dv], LSE [B, H, Sq], or packed sequences
(ops/attention/modes.py); fp16 and bf16, D and Dv multiples of 8 up to 256. Compute capability 9.0 only.

Tiles are powers of two wide, so a head of Q, K or O is held in one or two parts (192 is 128 + 64), padded by the copy
engine's zero fill; the scores are summed over the parts. ``memory`` and the descriptors have a tuple of parts for each. V is
one tile where one part would do. Else it is chunks of 64 columns, O is a tuple of pieces, and O += P V is the one product of
wide_gluon_sm90.py (the wide form, where ``v_low`` is not None).

The producer streams K and V tiles through rings of shared-memory stages. A consumer issues S = Q K^T of the next tile before
O += P V of this one, so that its softmax runs while the tensor cores work; P stays in registers. Programs are persistent: each
takes several tiles of queries. With two buffers for Q the producer runs on into the next tile while this one is computed.

Keys go from the last tile to the first. A mask is put on those alone that the diagonal or a window's ends cross; a window's
right end is a diagonal that lies so many keys later.

Of packed sequences a kernel before this one lists the tiles (packed_tiles_triton.py). The producer takes one after another from
a counter and tells the consumers (ops/pipeline_gluon.py); query heads that share a key head share a tile, and the copy engine's
maps end where a sequence does (``descriptors.ragged``).

Warp specialisation and the overlap of softmax with the products: Shah et al. 2024 (FlashAttention-3, sections 3.1 and 3.2).
``_attend`` names the builds in which rescaling of O is conditional (hopper_gluon.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe, CompileJob, Config, Launch
from flashmoe_science.ops.attention.append_fallback import Append
from flashmoe_science.ops.attention.bias_gluon_sm90 import (
    AT_ONCE,
    NO_BIAS,
    PAIR,
    STRIDES,
    BiasOf,
    bias_of,
    bias_rows,
    biased,
    stand_ins,
    start_bias,
    with_alibi,
)
from flashmoe_science.ops.attention.copies import (
    Parts,
    are_aligned,
    check_copied,
    copied_strides,
    described,
    descriptor_types,
    encoders_of,
)
from flashmoe_science.ops.attention.fwd_launch import (
    EVEN,
    PACKED,
    PAIRS,
    PAIRS_THEN_TILES,
    ROWS,
    Variant,
    configs,
    constexprs_of,
    grid_of,
    heads_of_tile,
    is_packed,
    most_listed,
    packed_grid,
    pair_rounds_of,
    queries_of_tile,
    registers,
    suits,
    supports,
    threads,
    tile_shapes,
    tiles_of_head,
    variant_of,
    window_of,
    workspace,
)
from flashmoe_science.ops.attention.hopper_gluon import (
    LAZY_ABOVE,
    as_matrix,
    capped,
    capped_softmax_step,
    coordinates,
    load_tile,
    log2_of_sum,
    mask_keys,
    memory_of,
    memory_of_keys,
    no_output,
    own_sums,
    pages_of_tile,
    parts_of,
    rescale_rows,
    scale_rows,
    softmax_step,
    start_output,
    wait_for_output,
    with_sink,
)
from flashmoe_science.ops.attention.inputs import (
    AttentionInputs,
    AttentionKernel,
    AttentionOutput,
    BoundLaunch,
    Launcher,
    Shapes,
    Sizes,
    allocate_output,
    output_strides,
    sizes_of,
)
from flashmoe_science.ops.attention.packed_tiles_triton import (
    NUMBERS_OF_TILE,
    WARPS,
    flashmoe_packed_tiles_triton,
    list_of_tiles,
    most_tiles,
    numbers,
)
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.split_triton import CacheLaunch, results_of, shapes_of_results
from flashmoe_science.ops.attention.wide_gluon_sm90 import (
    descriptor_of,
    in_parts,
    moved_in_warp,
    no_wide_output,
    packed,
    start_wide_output,
    wide_rescaled,
)
from flashmoe_science.ops.descriptors import MOST_ROWS, ragged, template
from flashmoe_science.ops.gluon_bridge import tma_load, tma_store
from flashmoe_science.ops.launch import Build, Encoder, Grid, Pointer, argument, can_start_early
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, give, make_board, take
from flashmoe_science.ops.plan import Cache

NAME = "fwd_gluon_sm90"
# Not specialised on: a new batch or length must not compile anew.
SIZES = ("heads", "group", "seqlen_q", "seqlen_k", "causal_offset", "tiles_m", "heads_all", "pair_rounds")
OF_PAGES = ("stride_table", "pitch_k", "pitch_v")
NUMBERS = gl.constexpr(NUMBERS_OF_TILE)
EVEN_KEYS = gl.constexpr(4)  # times as many keys of a sequence as queries: its tiles cost about the same


@gluon.jit
def _steps_of_program(tiles_m, heads_all, pair_rounds, DEAL: gl.constexpr):
    """Steps that a program takes; in some of the last it may find no work."""
    programs = gl.num_programs(0)
    if DEAL == PAIRS_THEN_TILES:
        pairs = (tiles_m + 1) // 2
        dealt = pair_rounds * programs
        left = heads_all * tiles_m - dealt // pairs * tiles_m - dealt % pairs * 2
        return 2 * pair_rounds + (left + programs - 1) // programs
    elif DEAL == PAIRS:
        return 2 * ((heads_all * ((tiles_m + 1) // 2) + programs - 1) // programs)
    else:
        return (heads_all * tiles_m + programs - 1) // programs


@gluon.jit
def _piece(step, tiles_m, heads_all, pair_rounds, CAUSAL: gl.constexpr, DEAL: gl.constexpr):
    """What to do in a step: (is there work, tile of queries, batch * heads + head).

    Neighbouring programs work on one head, whose K and V they then share in L2. A causal tile costs as many key tiles as its
    place from the top: a pair of the n-th from the bottom and the n-th from the top always costs the same, so that pairs dealt
    out evenly load every program evenly, but for the last round. What ``pair_rounds`` rounds of them leave goes out tile by
    tile then, as everything does where there are too few pairs: the heaviest first.
    """
    if DEAL == PAIRS_THEN_TILES:
        if step < 2 * pair_rounds:
            has_work, tile, head = _half_pair(step, tiles_m, heads_all)
        else:
            has_work, tile, head = _left_over(step - 2 * pair_rounds, tiles_m, heads_all, pair_rounds)
        return has_work, tile, head
    elif DEAL == PAIRS:
        return _half_pair(step, tiles_m, heads_all)
    else:
        index = step * gl.num_programs(0) + gl.program_id(0)
        if CAUSAL:
            return index < heads_all * tiles_m, tiles_m - 1 - index // heads_all, index % heads_all
        else:
            return index < heads_all * tiles_m, index % tiles_m, index // tiles_m


@gluon.jit
def _half_pair(step, tiles_m, heads_all):
    """What ``_piece`` gives of pairs: in even steps the lower tile of one, in odd steps its other, if it is another."""
    pairs = (tiles_m + 1) // 2
    unit = step // 2 * gl.num_programs(0) + gl.program_id(0)
    low = unit % pairs
    high = tiles_m - 1 - low
    second = step % 2 == 1
    return (unit < heads_all * pairs) & ((low != high) | (step % 2 == 0)), gl.where(second, high, low), unit // pairs


@gluon.jit
def _left_over(turn, tiles_m, heads_all, pair_rounds):
    """What ``_piece`` gives in a turn after the pairs. Dealt to and fro, so that who gets the heavier tile in one turn gets the
    lighter one in the next.

    Left are the heads that no pair was taken of, and one whose first pairs are gone: its inner tiles. Tiles of one place in
    their heads stand together, so a place has as many of them as heads that have it left.
    """
    programs = gl.num_programs(0)
    pairs = (tiles_m + 1) // 2
    begun = pair_rounds * programs // pairs  # the head whose inner tiles are left
    taken = pair_rounds * programs % pairs  # pairs of it
    heads = heads_all - begun - 1
    outer = heads * taken
    inner = (heads + 1) * (tiles_m - 2 * taken)
    index = turn * programs + gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    has_work = index < 2 * outer + inner
    place = tiles_m - 1
    head = begun + 1
    if index >= outer + inner:
        index -= outer + inner
        place = taken - 1
    elif index >= outer:
        index -= outer
        place = tiles_m - 1 - taken
        head = begun
        heads += 1
    heads = gl.maximum(heads, 1)
    return has_work, place - index // heads, head + index % heads


@gluon.jit
def _key_tiles(first_row, rows, span, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, ALIGNED: gl.constexpr):
    """Tiles of keys that rows [first_row, first_row + rows) look at: (the first, the one after the last).

    At least one, so that every row gets a result, and two where the diagonal may cross as many: the last may hold no key that
    they see. ``span``: see ``mask_keys``.
    """
    seqlen_q, seqlen_k, to_last, prefix, left = span
    end = seqlen_k
    if CAUSAL:
        own = first_row + rows + to_last
        if prefix is not None:
            own = gl.maximum(own, prefix)
        end = gl.minimum(end, own)
    tiles = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 2 if CAUSAL and not ALIGNED else 1)
    if left is None:
        return 0, tiles
    else:
        return gl.minimum(gl.maximum(first_row + seqlen_k - seqlen_q - left, 0) // BLOCK_N, tiles - 1), tiles


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
    """The same of a tile whose rows are on ``pages``, ``pitch`` rows from page to page. What follows the last of ``keys`` on
    its page is left out: the copy engine's maps end where a copy says (``descriptors.ragged``)."""
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
    low, high = _key_tiles(first_row, CONSUMERS * QUERIES, span, BLOCK_N, CAUSAL, ALIGNED)
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
def _produce(
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
        for step in range(_steps_of_program(tiles_m, heads_all, pair_rounds, DEAL)):
            has_work, tile_m, head_all = _piece(step, tiles_m, heads_all, pair_rounds, CAUSAL, DEAL)
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


@gluon.jit
def _start_scores(q_smem, slot, k_smem, stage):
    """Start S = Q K^T: an accumulator in flight, of as many products as there are parts."""
    ROWS: gl.constexpr = q_smem[0].shape[-3] * q_smem[0].shape[-2]
    BLOCK_N: gl.constexpr = k_smem[0].shape[-2]
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    s = warpgroup_mma(as_matrix(q_smem[0], slot), as_matrix(k_smem[0], stage).permute((1, 0)), s, use_acc=False, is_async=True)
    if len(k_smem) == 2:
        s = warpgroup_mma(as_matrix(q_smem[1], slot), as_matrix(k_smem[1], stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _store(o_descs, place, row, o, o_smem, slot):
    """Start the copies of all parts of O to device memory, by way of shared memory that holds nothing else."""
    out = o_smem[0].index(slot)
    out.reshape(o[0].shape).store(o[0].to(o_smem[0].dtype))
    if len(o) == 2:
        rest = o_smem[1].index(slot)
        rest.reshape(o[1].shape).store(o[1].to(o_smem[1].dtype))
    fence_async_shared()
    tma_store(o_descs[0], coordinates(place, row, 0), out)
    if len(o) == 2:
        tma_store(o_descs[1], coordinates(place, row, o[0].shape[1]), rest)


@gluon.jit
def _carried(p32, o, v_smem, v_low):
    """P as it goes from step to step: as the next product takes it."""
    if v_low is not None:
        return packed(p32, v_smem[0].dtype, len(o) * o[0].shape[1])
    else:
        return gl.convert_layout(p32.to(v_smem[0].dtype), gl.DotOperandLayout(0, o[0].type.layout, 2))


@gluon.jit
def _start_values(p, o, v_smem, stage, v_low, STAGES: gl.constexpr):
    """Start O += P V in one product."""
    if v_low is None:
        return start_output(p, o, v_smem, stage)
    else:
        STAGE: gl.constexpr = v_smem[0].shape[0] // STAGES * v_smem[0].shape[-2] * v_smem[0].shape[-1] * 2  # bytes
        return start_wide_output(p, o, v_low + stage * (STAGE >> 4), v_smem[0].dtype)


@gluon.jit
def _changed(s, scales, bias, drawn, of_rows, first_key):
    """Scores with what modes make of them, and by what a softmax is to scale them."""
    if scales[1] is not None:
        s = capped(s, scales[1])
    scale_log2 = scales[0]
    if bias[0] is not None:
        s, scale_log2 = biased(s, drawn, scale_log2)
    if bias[1] is not None:
        s, scale_log2 = with_alibi(s, scale_log2, of_rows, first_key)
    return s, scale_log2


@gluon.jit
def _step(
    tile, slot, memory, v_low, barriers, scales, bias, of_rows, first_row, span, state, rings,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, COMPENSATED: gl.constexpr, LAZY: gl.constexpr,
):  # fmt: skip
    """A tile of keys: its S is computed beside P V of the one before, which is the tile after it.

    The assembler would sink the softmax below the wait for P V, and with it the overlap; it does not move it across the
    branch of an mbarrier's wait. Hence the wait on a barrier that has long completed.

    ``state``: P of the tile before, O, and of each row the maximum, the sum and what rounding took from it.
    """
    p, o, row_max, row_sum, lost = state
    stage_k, phase_k, stage_v, phase_v = rings
    q_smem, k_smem, v_smem, o_smem = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    STAGES_K: gl.constexpr = k_smem[0].shape[0]
    STAGES_V: gl.constexpr = v_full.shape[0]
    BLOCK_N: gl.constexpr = k_smem[0].shape[-2]
    drawn = bias[0]
    if bias[0] is not None:
        drawn = start_bias(of_rows, tile * BLOCK_N, span[1], BLOCK_N, MASKED)
    mbarrier.wait(k_full.index(stage_k), phase_k)
    s_token = _start_scores(q_smem, slot, k_smem, stage_k)
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o_tokens = _start_values(p, o, v_smem, stage_v, v_low, STAGES_V)
    s = warpgroup_mma_wait(1, [s_token])
    mbarrier.arrive(k_empty.index(stage_k))
    stage_k, phase_k = advance(stage_k, phase_k, STAGES_K)
    HIDES: gl.constexpr = MASKED or bias[0] is not None
    PAIRS_LAST: gl.constexpr = v_low is None and o[0].shape[1] == 64
    if scales[1] is not None and bias[1] is None and not HIDES and BLOCK_N == 128:
        p32, row_max, rescale = capped_softmax_step(s, row_max, scales, LAZY)
    else:
        s, scale_log2 = _changed(s, scales, bias, drawn, of_rows, tile * BLOCK_N)
        if MASKED:
            s = mask_keys(s, tile * BLOCK_N, first_row, span, q_smem[0].shape[-2], CAUSAL)
        p32, row_max, rescale = softmax_step(s, row_max, scale_log2, HIDES, LAZY, PAIRS_LAST)
    shrink = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout)), 1)
    before = row_sum * shrink
    more = gl.convert_layout(own_sums(p32), row_sum.type.layout)
    if COMPENSATED:  # for what rounding takes (Kahan 1965): else a sum of 16k is off by 2e-6, all of the error of an LSE
        more -= lost * shrink
    row_sum = before + more
    if COMPENSATED:
        lost = (row_sum - before) - more
    if v_low is not None:
        moved = moved_in_warp(rescale, LAZY)
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o = wait_for_output(o_tokens)
    if v_low is not None:
        o = wide_rescaled(o, rescale, moved)
    else:
        o = rescale_rows(o, rescale, LAZY)
    mbarrier.arrive(v_empty.index(stage_v))
    stage_v, phase_v = advance(stage_v, phase_v, STAGES_V)
    return (_carried(p32, o, v_smem, v_low), o, row_max, row_sum, lost), (stage_k, phase_k, stage_v, phase_v)


@gluon.jit
def _let_pass(tiles, barriers, rings):
    """Take so many tiles of keys and give them back unread."""
    stage_k, phase_k, stage_v, phase_v = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    for _ in range(tiles):
        mbarrier.wait(k_full.index(stage_k), phase_k)
        mbarrier.arrive(k_empty.index(stage_k))
        stage_k, phase_k = advance(stage_k, phase_k, k_full.shape[0])
        mbarrier.wait(v_full.index(stage_v), phase_v)
        mbarrier.arrive(v_empty.index(stage_v))
        stage_v, phase_v = advance(stage_v, phase_v, v_full.shape[0])
    return stage_k, phase_k, stage_v, phase_v


@gluon.jit
def _pass(
    memory, barriers, sequence, causal_offset, prefix, left, top_row, turn, rings,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """What ``_attend`` takes of a sequence's last tile of queries, for a consumer whose rows would all lie past the end: the
    tensor cores are the others' alone."""
    batch, end_q, rows, keys = sequence
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    QUERIES: gl.constexpr = memory[0][0].shape[-2]
    BLOCK_N: gl.constexpr = memory[1][0].shape[-2]
    slot = turn % (q_full.shape[0] // CONSUMERS) * CONSUMERS + CONSUMER
    mbarrier.wait(q_full.index(slot), turn // (q_full.shape[0] // CONSUMERS) & 1)
    mbarrier.arrive(q_empty.index(slot))
    if prefix is not None:
        prefix = gl.load(prefix + batch)
    span = (rows, keys, keys - rows + causal_offset, prefix, left)
    low, high = _key_tiles(top_row, CONSUMERS * QUERIES, span, BLOCK_N, CAUSAL, True)
    return _let_pass(high - low, barriers, rings)


@gluon.jit
def _attend(
    output, memory, barriers, sizes, sequence, prefix, left, top_row, head_all, turn, rings,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, ALIGNED: gl.constexpr, EVEN_K: gl.constexpr,
    WRITE_LSE: gl.constexpr, OWN_OUT: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """A consumer's 64 rows of one tile of queries, of ``head_all`` and, of packed sequences, of heads after it that share its
    keys. ``sequence``: of packed ones its number, where its queries end among all of them, how many it has, and how many keys;
    None else. ``prefix``: where the keys that all queries of a sequence see are, or None; ``left``: see ``mask_keys``."""
    o_descs, lse_base, scales, v_low, sinks, bias = output
    q_smem, k_smem, v_smem, o_smem = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds = sizes
    HEADS: gl.constexpr = q_smem[0].shape[-3]
    QUERIES: gl.constexpr = q_smem[0].shape[-2]
    ROWS: gl.constexpr = HEADS * QUERIES
    STAGES_Q: gl.constexpr = q_smem[0].shape[0] // CONSUMERS
    STAGES_K: gl.constexpr = k_smem[0].shape[0]
    STAGES_V: gl.constexpr = v_full.shape[0]
    BLOCK_N: gl.constexpr = k_smem[0].shape[-2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    # Conditional rescaling where it measured faster: of 64 columns for one consumer alone, of more always, and in the wide form
    # of fewer where a mask leaves less to hide behind.
    WIDE: gl.constexpr = v_low is not None
    COLUMNS: gl.constexpr = o_descs[0].block_type.shape[-1] + (o_descs[1].block_type.shape[-1] if WIDE else 0)
    NARROW: gl.constexpr = COLUMNS == LAZY_ABOVE and CONSUMERS == 1 and BLOCK_N == 128 and CAUSAL
    LAZY: gl.constexpr = COLUMNS > LAZY_ABOVE or NARROW or (WIDE and CAUSAL)
    PACKED: gl.constexpr = sequence is not None
    LEFT: gl.constexpr = left is not None
    COUNTED: gl.constexpr = ALIGNED or PACKED or LEFT  # whether loops may have no step
    ENDS: gl.constexpr = CAUSAL or not EVEN_K or LEFT  # whether the first tile needs a mask
    HIDES: gl.constexpr = ENDS or bias[0] is not None  # whether it may hold no key that a row sees
    lse_rows = seqlen_q
    batch = head_all // heads
    if PACKED:
        batch, seqlen_q, seqlen_k = sequence[0], sequence[2], sequence[3]
        causal_offset += seqlen_k - seqlen_q
    if prefix is not None:
        prefix = gl.load(prefix + batch)
    span = (seqlen_q, seqlen_k, causal_offset, prefix, left)
    first_row = top_row + CONSUMER * QUERIES
    low, high = _key_tiles(first_row, QUERIES, span, BLOCK_N, CAUSAL, COUNTED)
    if CAUSAL:  # tiles that only the later consumers of this program need: let them pass
        _, end = _key_tiles(top_row, CONSUMERS * QUERIES, span, BLOCK_N, CAUSAL, COUNTED)
        rings = _let_pass(end - high, barriers, rings)
    stage_k, phase_k, stage_v, phase_v = rings

    # The first tile, alone.
    of_rows = bias[0]  # where each row's bias begins; of ALiBi the head's slope and each row's own key
    drawn = bias[0]
    if bias[0] is not None:
        of_rows = bias_rows(bias, batch, head_all % heads, first_row, seqlen_q, ROWS, UNIT, s_layout)
        drawn = start_bias(of_rows, (high - 1) * BLOCK_N, seqlen_k, BLOCK_N, ENDS)
    if bias[1] is not None:
        slope = gl.load(bias[1] + batch * bias[2] + head_all % heads) * 1.4426950408889634
        of_rows = (slope, first_row + seqlen_k - seqlen_q + gl.arange(0, ROWS, row_layout))
    slot = turn % STAGES_Q * CONSUMERS + CONSUMER
    mbarrier.wait(q_full.index(slot), turn // STAGES_Q & 1)
    mbarrier.wait(k_full.index(stage_k), phase_k)
    s = warpgroup_mma_wait(0, [_start_scores(q_smem, slot, k_smem, stage_k)])
    mbarrier.arrive(k_empty.index(stage_k))
    stage_k, phase_k = advance(stage_k, phase_k, STAGES_K)
    s, scale_log2 = _changed(s, scales, bias, drawn, of_rows, (high - 1) * BLOCK_N)
    if ENDS:
        s = mask_keys(s, (high - 1) * BLOCK_N, first_row, span, QUERIES, CAUSAL)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    p32, row_max, unused = softmax_step(s, row_max, scale_log2, HIDES, False, COLUMNS == 64 and not WIDE)
    row_sum = own_sums(p32)
    lost = gl.zeros_like(row_sum)
    if v_low is not None:
        o = no_wide_output(ROWS, COLUMNS, BLOCK_N)
    else:
        o = no_output(v_smem, ROWS)
    p = _carried(p32, o, v_smem, v_low)

    # The others: one more with a mask where the diagonal may cross two tiles, then without, then those that a window begins in.
    state, rings = (p, o, row_max, row_sum, lost), (stage_k, phase_k, stage_v, phase_v)
    done = high - 1  # the tile that was done last
    if CAUSAL and not COUNTED:
        done -= 1
        state, rings = _step(
            done, slot, memory, v_low, barriers, scales, bias, of_rows, first_row, span, state, rings,
            True, CAUSAL, WRITE_LSE, LAZY,
        )  # fmt: skip
    elif CAUSAL and not ALIGNED:
        masked = gl.minimum((causal_offset % QUERIES != 0).to(gl.int32), done - low)
        for _ in range(masked):
            done -= 1
            state, rings = _step(
                done, slot, memory, v_low, barriers, scales, bias, of_rows, first_row, span, state, rings,
                True, CAUSAL, WRITE_LSE, LAZY,
            )  # fmt: skip
    whole = low
    if LEFT:
        last_begin = gl.maximum(first_row + QUERIES - 1 + seqlen_k - seqlen_q - left, 0)
        whole = gl.minimum((last_begin + BLOCK_N - 1) // BLOCK_N, done)
    for i in range(done - whole):
        state, rings = _step(
            done - 1 - i, slot, memory, v_low, barriers, scales, bias, of_rows, first_row, span, state, rings,
            False, CAUSAL, WRITE_LSE, LAZY,
        )  # fmt: skip
    if LEFT:
        for i in range(whole - low):
            state, rings = _step(
                whole - 1 - i, slot, memory, v_low, barriers, scales, bias, of_rows, first_row, span, state, rings,
                True, CAUSAL, WRITE_LSE, LAZY,
            )  # fmt: skip
    p, o, row_max, row_sum, lost = state
    stage_k, phase_k, stage_v, phase_v = rings
    if OWN_OUT:
        mbarrier.arrive(q_empty.index(slot))
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o = wait_for_output(_start_values(p, o, v_smem, stage_v, v_low, STAGES_V))
    mbarrier.arrive(v_empty.index(stage_v))
    stage_v, phase_v = advance(stage_v, phase_v, STAGES_V)
    rings = (stage_k, phase_k, stage_v, phase_v)
    if LEFT:  # tiles that only the earlier consumers of this program need
        begin, _ = _key_tiles(top_row, CONSUMERS * QUERIES, span, BLOCK_N, CAUSAL, COUNTED)
        rings = _let_pass(low - begin, barriers, rings)

    # A row that sees no key has a sum of 0: its output is 0 and its log-sum-exp log(0) = -inf.
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
    if scales[1] is not None and (WRITE_LSE or sinks is not None):
        row_max += 0.5 * scales[0]  # what ``capped`` leaves out
    inverse = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
    if sinks is not None:
        sinks_at = sinks + head_all % heads
        if HEADS > 1:
            sinks_at += gl.arange(0, ROWS, row_layout) // QUERIES
        row_max, row_sum, shrink = with_sink(gl.load(sinks_at), row_max, row_sum)
        inverse = shrink / gl.where(row_sum == 0.0, 1.0, row_sum)
    o = scale_rows(o, inverse)
    if v_low is not None:
        o = in_parts(o, o_descs[0].block_type.shape[-1])
    tma.store_wait(0)  # the copy of the last tile's output has left shared memory
    if PACKED:
        place = (head_all, sequence[1], seqlen_q)
    else:
        place = (head_all // heads, head_all % heads)  # type: ignore[assignment]  # not kept in a register over the loop
    if OWN_OUT:
        _store(o_descs, place, first_row, o, o_smem, CONSUMER)
    else:
        _store(o_descs, place, first_row, o, o_smem, slot)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(slot))
    if WRITE_LSE:
        row = gl.arange(0, ROWS, row_layout)
        shift = gl.where(row_max == float("-inf"), 0.0, row_max)
        lse = (shift + log2_of_sum(row_sum)) * 0.6931471805599453
        lse_at = lse_base + head_all.to(gl.int64) * lse_rows
        if PACKED:
            lse_at += sequence[1] - seqlen_q + (row // QUERIES).to(gl.int64) * lse_rows
            row = row % QUERIES
        row = first_row + row
        gl.store(lse_at + row, lse, mask=row < seqlen_q)
    return rings


@gluon.jit
def _consume(
    output, memory, barriers, work,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, ALIGNED: gl.constexpr, EVEN_K: gl.constexpr,
    WRITE_LSE: gl.constexpr, OWN_OUT: gl.constexpr, DEAL: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 rows of every tile of queries that this program works on."""
    sizes, tiles, board, prefix, left, cache = work
    heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds = sizes
    QUERIES: gl.constexpr = memory[0][0].shape[-2]
    rings = first_stage() + first_stage()
    turn = gl.to_tensor(0)  # tiles of queries done so far
    if tiles is None:
        for step in range(_steps_of_program(tiles_m, heads_all, pair_rounds, DEAL)):
            has_work, tile_m, head_all = _piece(step, tiles_m, heads_all, pair_rounds, CAUSAL, DEAL)
            if has_work:
                rings = _attend(
                    output, memory, barriers, sizes, None, prefix, left, tile_m * (CONSUMERS * QUERIES), head_all, turn,
                    rings, CONSUMER, CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, UNIT,
                )  # fmt: skip
                turn += 1
    else:
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        head, batch, top_row, end_q, rows, keys = take(board, turn, one)
        while head >= 0:
            sequence = (batch, end_q, rows, keys)
            if CONSUMER == 0 or top_row + CONSUMER * QUERIES < rows:
                rings = _attend(
                    output, memory, barriers, sizes, sequence, prefix, left, top_row, head, turn,
                    rings, CONSUMER, CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, UNIT,
                )  # fmt: skip
            else:
                rings = _pass(
                    memory, barriers, sequence, causal_offset, prefix, left, top_row, turn, rings, CONSUMER, CONSUMERS, CAUSAL
                )
            turn += 1
            head, batch, top_row, end_q, rows, keys = take(board, turn, one)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=(*SIZES, *STRIDES, *OF_PAGES, "left"))
def flashmoe_fwd_gluon_sm90(
    q_desc, k_desc, v_desc, o_desc, q_rest, k_rest, v_rest, o_rest, lse_base, softmax_scale, softcap, tiles, prefix, left,
    table, stride_table, pitch_k, pitch_v, sinks, slopes, bias, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_m,
    heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES_Q: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
    CAUSAL: gl.constexpr, ALIGNED: gl.constexpr, EVEN_K: gl.constexpr, WRITE_LSE: gl.constexpr, OWN_OUT: gl.constexpr,
    DEAL: gl.constexpr, UNIT: gl.constexpr, PAGE: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    q_descs, k_descs = parts_of(q_desc, q_rest), parts_of(k_desc, k_rest)
    o_descs = parts_of(o_desc, o_rest)
    CHUNKS: gl.constexpr = 1 if o_rest is None else (o_desc.block_type.shape[-1] + o_rest.block_type.shape[-1] + 63) // 64
    q_smem = memory_of(q_descs, STAGES_Q * CONSUMERS)
    k_smem = memory_of_keys(k_descs, STAGES_K, BLOCK_N)
    v_smem = memory_of_keys((v_desc,), STAGES_V * CHUNKS, BLOCK_N)
    if OWN_OUT:
        o_smem = memory_of(o_descs, CONSUMERS)
    else:  # Q's tile is dead once the last scores are computed
        o_smem = q_smem
    if o_rest is not None:
        v_low = descriptor_of(v_smem[0])
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES_Q * CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES_Q * CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES_K, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES_Q * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES_K):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES_V):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    if tiles is not None:
        board = make_board(6, CONSUMERS)
    fence_async_shared()
    gdc_wait()  # all above ran while the kernel before this one was finishing; its results are visible from here on
    scale_log2 = softmax_scale * 1.4426950408889634
    scales = (scale_log2, softcap)
    if softcap is not None:  # of what ``capped`` gives, and of the scores in it
        scales = (2.0 * softcap * 1.4426950408889634, 2.0 * scale_log2 / softcap)

    memory = (q_smem, k_smem, v_smem, o_smem)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds)
    cache = (table, stride_table, pitch_k, pitch_v)
    work = (sizes, tiles, v_rest, prefix, left, cache)  # without a list of tiles no board: None
    if tiles is not None:
        work = (sizes, tiles, board, prefix, left, cache)
    of_bias = (bias, slopes, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_m)
    output = (o_descs, lse_base, scales, v_rest, sinks, of_bias)  # of V there is no other part: None
    if o_rest is not None:
        output = (o_descs, lse_base, scales, v_low, sinks, of_bias)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (output, memory, barriers, work, 0, CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, DEAL, UNIT),
                ),
                (_produce, (q_descs, k_descs, v_desc, memory, barriers, work, CONSUMERS, CAUSAL, ALIGNED, DEAL, PAGE)),
            ],
            [1],
            [PRODUCER_REGS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (output, memory, barriers, work, 0, CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, DEAL, UNIT),
                ),
                (
                    _consume,
                    (output, memory, barriers, work, 1, CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, DEAL, UNIT),
                ),
                (_produce, (q_descs, k_descs, v_desc, memory, barriers, work, CONSUMERS, CAUSAL, ALIGNED, DEAL, PAGE)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (output, memory, barriers, work, 0, CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, DEAL, UNIT),
                ),
                (
                    _consume,
                    (output, memory, barriers, work, 1, CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, DEAL, UNIT),
                ),
                (
                    _consume,
                    (output, memory, barriers, work, 2, CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, DEAL, UNIT),
                ),
                (_produce, (q_descs, k_descs, v_desc, memory, barriers, work, CONSUMERS, CAUSAL, ALIGNED, DEAL, PAGE)),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )


def plan(inputs: AttentionInputs, config: Config) -> FwdLauncher:
    check_copied(inputs)
    gpu = current_gpu(inputs.q.device)
    assert gpu is not None
    extras = inputs.extras
    dtypes = [None if one is None else one.dtype for one in (extras.sinks, extras.alibi_slopes, extras.bias)]
    kind = PackedLauncher if is_packed(inputs.problem) else FwdLauncher
    return kind(inputs.problem, config, gpu, inputs.return_lse, can_start_early(inputs.q.device), dtypes)


class _OfQueries(NamedTuple):
    """What of a launch stays as it is while a cache of keys and values grows."""

    build: Build
    grid: Grid
    encode_q: Parts
    encode_out: Parts
    tail: tuple[Any, ...]  # the kernel's arguments after ``causal_offset``


class FwdLauncher(Launcher):
    """A length costs the host what depends on it, and no more. ``bind`` is for problems without modes, ``bind_inputs`` for
    those with modes too, whose values each call has. ``dtypes``: of sinks, slopes and bias, None for none."""

    def __init__(
        self, problem: AttentionProblem, config: Config, gpu: Gpu, write_lse: bool, early_start: bool,
        dtypes: Sequence[torch.dtype | None] = (None, None, None),
    ) -> None:  # fmt: skip
        self._problem, self._config, self._gpu, self._write_lse, self._dtypes = problem, config, gpu, write_lse, dtypes
        tiles = tile_shapes(problem, config)
        self._templates = tuple(None if tile is None else template(tile, problem.dtype) for tile in tiles)
        self._early_start = early_start
        self._options = {"num_warps": 4, "maxnreg": registers(config), "launch_pdl": early_start}
        self._builds: dict[Variant, tuple[Build, tuple[Any, ...]]] = {}
        self._of_queries: Cache[Hashable, _OfQueries] = Cache(64)
        self._block_n, self._causal, self._mask = config["block_n"], problem.causal, problem.mask
        self._left, self._right = window_of(problem)

    def bind_inputs(self, inputs: AttentionInputs, num_splits: int = 0) -> Callable[[AttentionInputs], AttentionOutput]:
        """The call of inputs of the same shapes and strides as these. Raises CannotServe."""
        _check_splits(num_splits)
        q, k, v, out = inputs.q, inputs.k, inputs.v, inputs.out
        of_out = output_strides(q, v.shape[3]) if out is None else out.stride()
        bias = bias_of(inputs.extras)
        launch = self._bind((q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride(), of_out), bias)
        capped = bool(self._problem.modes.softcap)

        def bound(inputs: AttentionInputs) -> AttentionOutput:
            result, extras = allocate_output(inputs), inputs.extras
            more = (argument(extras.sinks), argument(extras.alibi_slopes), argument(extras.bias), argument(extras.prefix))
            softcap = extras.softcap if capped else None
            launch(inputs.q, inputs.k, inputs.v, result.out, result.lse, inputs.softmax_scale, softcap, *more)
            return result

        return bound

    def bind(self, shapes: Shapes, strides: Shapes) -> BoundLaunch:
        return self._bind(shapes, strides, NO_BIAS)

    def _bind(self, shapes: Shapes, strides: Shapes, bias: BiasOf) -> Callable[..., None]:
        shape_q, shape_k, shape_v = shapes
        of_q, of_k, of_v, of_out = strides
        (_, heads, rows, _), (_, heads_kv, keys, _) = shape_q, shape_k
        offset = keys - rows if self._mask == "causal" else 0
        even = offset >= EVEN * rows
        key = (shape_q, of_q, of_out, keys % self._block_n == 0, self._causal and (even, offset % ROWS == 0), bias.unit)
        found = self._of_queries.get(key) or self._prepare(key, shapes, of_q, of_out, bias.unit)
        build, grid, encode_q, encode_out, tail = found
        encode_k = encoders_of(build, self._templates, 1, shape_k, copied_strides("key", shape_k, of_k))
        encode_v = encoders_of(build, self._templates, 2, shape_v, copied_strides("value", shape_v, of_v))
        to_last = offset if self._right is None else keys - rows + self._right
        numbers = (*bias.strides, heads, heads // heads_kv, rows, keys, to_last, *tail)
        return _bound(build.launch, grid, (encode_q, encode_k, encode_v, encode_out), self._left, numbers)

    def _prepare(
        self, key: Hashable, shapes: Shapes, of_q: tuple[int, ...], of_out: tuple[int, ...], bias_unit: int
    ) -> _OfQueries:
        sizes, shape_out = sizes_of(shapes, self._mask), (*shapes[0][:3], shapes[2][3])
        strides_q, strides_out = copied_strides("query", shapes[0], of_q), copied_strides("out", shape_out, of_out)
        grid, variant = grid_of(sizes, self._config, self._gpu), variant_of(sizes, self._config, self._gpu, bias_unit)
        build, constexprs = self._builds.get(variant) or self._build(variant)
        encode_q = encoders_of(build, self._templates, 0, shapes[0], strides_q)
        encode_out = encoders_of(build, self._templates, 3, shape_out, strides_out)
        tail = (*_schedule(sizes, self._config, grid[0]), *constexprs)
        made = self._of_queries[key] = _OfQueries(build, grid, encode_q, encode_out, tail)
        return made

    def _build(self, variant: Variant) -> tuple[Build, tuple[Any, ...]]:
        constexprs = tuple(constexprs_of(self._problem, self._config, variant, self._write_lse).values())
        lse = Pointer(torch.float32) if self._write_lse else None
        softcap = 0.5 if self._problem.modes.softcap else None
        sizes = [1] * len(SIZES)  # no build depends on them
        more = stand_ins(self._dtypes, variant.bias_unit)
        tiles = Pointer(torch.int32) if is_packed(self._problem) else None
        prefix = Pointer(torch.int32, 4) if self._problem.modes.prefix else None
        left = None if self._left is None else 1
        cache = (Pointer(torch.int32, 4), 1, 1, 1) if self._problem.modes.page else (None,) * 4
        arguments = (*self._templates, lse, 0.5, softcap, tiles, prefix, left, *cache, *more, *sizes, *constexprs)
        made = self._builds[variant] = Build(flashmoe_fwd_gluon_sm90, arguments, **self._options), constexprs
        return made


def _check_splits(num_splits: int) -> None:
    if num_splits > 1:
        raise CannotServe(f"num_splits is {num_splits}; this kernel never splits keys")


# (q, k, v and out as tensors; the addresses of lse, the list of tiles, cu_seqlens_q, cu_seqlens_k, seqused_k, the page table,
# prefix, sinks and slopes; softmax_scale, softcap)
_PackedLaunch = Callable[..., None]


class PackedLauncher(FwdLauncher):
    """The same for packed sequences, whose tiles another kernel lists first: ``bind_inputs`` and ``bind_cache`` alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lists: dict[tuple[bool, bool], Callable[..., None]] = {}
        self._capped = bool(self._problem.modes.softcap)

    def bind_inputs(self, inputs: AttentionInputs, num_splits: int = 0) -> Callable[[AttentionInputs], AttentionOutput]:
        _check_splits(num_splits)
        launch, listed = self._bind_packed(inputs)
        results = results_of(inputs, listed)

        def bound(inputs: AttentionInputs) -> AttentionOutput:
            x = inputs.extras
            out, lse, tiles = results(inputs.out)
            lengths = (x.cu_seqlens_q, x.cu_seqlens_k, x.cache_seqlens, x.page_table)
            of_call = [argument(one) for one in (lse, tiles, *lengths, x.prefix, x.sinks, x.alibi_slopes)]
            launch(inputs.q, inputs.k, inputs.v, out, *of_call, inputs.softmax_scale, x.softcap if self._capped else None)
            return AttentionOutput(out, lse)

        return bound

    def bind_cache(self, inputs: AttentionInputs, num_splits: int, append: Append | None) -> CacheLaunch:
        """The call of tensors like these, without a look at them. Raises CannotServe."""
        assert append is None  # nothing is appended to packed keys
        _check_splits(num_splits)
        launch, listed = self._bind_packed(inputs)
        results, scale = results_of(inputs, listed, tokens_first=True), inputs.softmax_scale
        softcap = inputs.extras.softcap if self._capped else None

        def run(
            tensors: tuple[torch.Tensor | None, ...], length: int, softmax_scale: float | None
        ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
            q, k, v, cu_q, cu_k, used, table, _, _, sinks, slopes, *_ = tensors
            if not are_aligned(q, k, v):
                return None
            out, lse, tiles = results(None)
            of_call = [argument(one) for one in (lse, tiles, cu_q, cu_k, used, table, None, sinks, slopes)]
            launch(q, k, v, out, *of_call, scale if softmax_scale is None else softmax_scale, softcap)
            return out, lse

        return run

    def _bind_packed(self, inputs: AttentionInputs) -> tuple[_PackedLaunch, int]:
        """The launch of tensors of such shapes and strides, and how many numbers the list of tiles is. Raises CannotServe."""
        q, k, v, extras = inputs.q, inputs.k, inputs.v, inputs.extras
        assert extras.cu_seqlens_q is not None
        if extras.cu_seqlens_k is extras.page_table is None:
            raise CannotServe("keys are in a cache without pages; of packed queries this kernel takes packed keys, or pages")
        batch, (_, heads, total, _), (_, heads_kv, keys, _) = extras.cu_seqlens_q.shape[0] - 1, q.shape, k.shape
        rows = queries_of_tile(self._problem, self._config)
        listed = most_tiles(total, batch, rows)
        grid = packed_grid(listed * heads // heads_of_tile(self._problem), self._config, self._gpu)
        build, constexprs = self._builds.get(PACKED) or self._build(PACKED)
        of_out = shapes_of_results(inputs)[1] if inputs.out is None else inputs.out.stride()
        tensors = (
            ("query", q.shape, q.stride()),
            ("key", k.shape, k.stride()),
            ("value", v.shape, v.stride()),
            ("out", (*q.shape[:3], v.shape[3]), of_out),
        )
        encoders = tuple(
            encoders_of(build, self._templates, n, *ragged(shape[1:], copied_strides(name, shape, strides)[1:]))
            for n, (name, shape, strides) in enumerate(tensors)
        )
        numbers_of_heads = (heads, heads // heads_kv, total, keys, self._right or 0, 0, batch * heads, 0)
        tail = (*bias_of(extras).strides, *numbers_of_heads, *constexprs)
        left, most_keys, of_pages = self._left, 2**30, _of_pages(inputs)
        if extras.page_table is not None:
            most_keys = extras.page_table.shape[1] * keys
        kind = (extras.cu_seqlens_k is not None, extras.cache_seqlens is not None)
        start, list_tiles, list_grid = build.launch, self._list(kind, rows), (batch, 1, 1)

        def launch(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: Any, tiles: Any, cu_q: Any, cu_k: Any,
            used: Any, table: Any, prefix: Any, sinks: Any, slopes: Any, scale: float, softcap: float | None,
        ) -> None:  # fmt: skip
            list_tiles(list_grid, tiles, cu_q, cu_k, used, batch, most_keys, listed)
            descriptors = described(encoders, (q, k, v, out))
            start(grid, *descriptors, lse, scale, softcap, tiles, prefix, left, table, *of_pages, sinks, slopes, None, *tail)

        return launch, numbers(listed)

    def _list(self, kind: tuple[bool, bool], rows: int) -> Callable[..., None]:
        made = self._lists.get(kind)
        if made is None:
            made = self._lists[kind] = list_of_tiles(rows, *kind, self._early_start)
        return made


def _of_pages(inputs: AttentionInputs) -> tuple[int | None, int | None, int | None]:
    """From a sequence's entries of the table to the next's, and rows from page to page of K and of V. Raises CannotServe."""
    table = inputs.extras.page_table
    if table is None:
        return None, None, None
    return table.stride(0), _pitch("key", inputs.k), _pitch("value", inputs.v)


def _pitch(name: str, cache: torch.Tensor) -> int:
    of_page, _, of_row, _ = copied_strides(name, cache.shape, cache.stride())
    if of_page % of_row or cache.shape[0] * (of_page // of_row) >= MOST_ROWS:
        raise CannotServe(
            f"{name} has {cache.shape[0]} pages, {of_page} elements from one to the next and {of_row} from row to row; this "
            f"kernel needs whole rows from page to page, and under {MOST_ROWS} in all"
        )
    return of_page // of_row


def _schedule(sizes: Sizes, config: Config, programs: int) -> tuple[int, int, int]:
    """The kernel's last three integers: tiles_m, heads_all and pair_rounds."""
    return tiles_of_head(sizes, config), sizes.batch * sizes.heads, pair_rounds_of(sizes, config, programs)


def _bound(
    launch: Callable[..., None], grid: Grid, encoders: tuple[Parts, ...], left: int | None, tail: tuple[Any, ...]
) -> Callable[..., None]:
    (encode_q, rest_q), (encode_k, rest_k), (encode_v, _), (encode_out, rest_out) = encoders
    no_rest = (None, None, None, None)
    whole = rest_q is None and rest_out is None

    def bound(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float,
        softcap: float | None = None, sinks: Any = None, slopes: Any = None, bias: Any = None, prefix: Any = None,
    ) -> None:  # fmt: skip
        rest = no_rest if whole else (*_rest(rest_q, q), *_rest(rest_k, k), None, *_rest(rest_out, out))
        lse_address = None if lse is None else lse.data_ptr()
        values = (lse_address, scale, softcap, None, prefix, left, None, None, None, None, sinks, slopes, bias)
        launch(grid, *encode_q(q), *encode_k(k), *encode_v(v), *encode_out(out), *rest, *values, *tail)

    return bound


def _rest(encode: Encoder | None, tensor: torch.Tensor) -> tuple[Any, ...]:
    return (None,) if encode is None else encode(tensor)


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    return plan(inputs, config).bind_inputs(inputs)(inputs)


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    name = f"^{flashmoe_fwd_gluon_sm90.__name__}$"
    if not is_packed(problem):
        return (Launch(name, grid_of(problem, config, gpu), threads(config)),)
    tiles = most_listed(problem, config) * problem.heads // heads_of_tile(problem)
    main = Launch(name, packed_grid(tiles, config, gpu), threads(config))
    return Launch(f"^{flashmoe_packed_tiles_triton.__name__}$", (problem.batch, 1, 1), 32 * WARPS), main


def compile_job(problem: AttentionProblem, config: Config, gpu: Gpu) -> CompileJob:
    modes = problem.modes
    unit = AT_ONCE.value if modes.bias == "additive" else PAIR
    variant = PACKED if is_packed(problem) else variant_of(problem, config, gpu, unit)
    constexprs = constexprs_of(problem, config, variant, write_lse=True)
    signature = dict.fromkeys(flashmoe_fwd_gluon_sm90.arg_names, "i32")
    types = descriptor_types("qkvo", tile_shapes(problem, config), problem.dtype)
    signature |= {name: one for name, one in types.items() if one is not None}
    constexprs |= {name: None for name, one in types.items() if one is None}
    more = {"softcap": "fp32" if modes.softcap else None, "sinks": "*fp32" if modes.sinks else None}
    more |= {"slopes": "*fp32" if modes.bias == "alibi" else None, "stride_slopes": "i64" if modes.bias == "alibi" else None}
    more |= {"tiles": "*i32" if is_packed(problem) else None, "prefix": "*i32" if modes.prefix else None}
    more |= {"table": "*i32" if modes.page else None} | dict.fromkeys(OF_PAGES, "i32" if modes.page else None)
    more |= {"left": None if window_of(problem)[0] is None else "i32"}
    more |= {"bias": {"boolean": "*u8", "additive": f"*{problem.dtype}"}.get(modes.bias)}
    more |= dict.fromkeys(STRIDES[1:], "i64" if more["bias"] else None)
    signature |= {"lse_base": "*fp32", "softmax_scale": "fp32"} | {name: one for name, one in more.items() if one is not None}
    constexprs |= {name: None for name, one in more.items() if one is None}
    signature |= dict.fromkeys(constexprs, "constexpr")
    return CompileJob(
        function=flashmoe_fwd_gluon_sm90,
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=("lse_base", *(name for name in ("bias", "tiles") if more[name])),
        num_warps=4,
        num_stages=1,
        threads=threads(config),
        maxnreg=registers(config),
        gluon=True,
    )


KERNEL = AttentionKernel(
    name=NAME,
    origin="ours",
    op="attention",
    about="warp-specialised Gluon for Hopper: a TMA producer and one to three consumer warpgroups",
    supports=supports,
    configs=configs,
    run=run,
    launches=launches,
    plan=plan,
    workspace=workspace,
    compile_job=compile_job,
    suits=suits,
)
