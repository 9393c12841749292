"""Attention forward for Hopper in Gluon: a TMA producer warp and one to three consumer warpgroups of 64 query rows each.

Shapes: Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv] -> O [B, H, Sq, Dv], LSE [B, H, Sq]; fp16 and bf16, D and Dv
multiples of 8 up to 256. Compute capability 9.0 only.

Tiles are powers of two wide, so a head of Q, K or O is held in one or two parts (192 is 128 + 64), padded by the copy
engine's zero fill; the scores are summed over the parts. ``memory`` and the descriptors have a tuple of parts for each. V is
one tile where one part would do. Else it is chunks of 64 columns, O is a tuple of pieces, and O += P V is the one product of
wide_gluon_sm90.py (the wide form, where ``v_low`` is not None).

The producer streams K and V tiles through rings of shared-memory stages. A consumer issues S = Q K^T of the next tile before
O += P V of this one, so that its softmax runs while the tensor cores work; P stays in registers. Programs are persistent: each
takes several tiles of queries. With two buffers for Q the producer runs on into the next tile while this one is computed.

Warp specialisation and the overlap of softmax with the products: Shah et al. 2024 (FlashAttention-3, sections 3.1 and 3.2).
In the builds that ``_consume`` names, rescaling of O is conditional: Zadouri et al. 2026 (FlashAttention-4). A row's reference
maximum stays where the maximum grows by less than 2^8, and a warp none of whose references moved skips rescaling.

A soft cap is one of scores less the cap, which ``_capped`` gives in two instructions of the special-function unit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import ceil, gcd
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
from flashmoe_science.kernel import CannotServe, CompileJob, Config, Device, Launch
from flashmoe_science.ops.attention.append_fallback import Append
from flashmoe_science.ops.attention.bias_gluon_sm90 import (
    AT_ONCE,
    EXCHANGE_BYTES,
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
    check_copied,
    copied_strides,
    described,
    descriptor_types,
    encoders_of,
    fills_tiles,
    why_not_capped,
    why_not_copied,
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
from flashmoe_science.ops.attention.lengths import sequence_lengths
from flashmoe_science.ops.attention.modes import unserved
from flashmoe_science.ops.attention.packed_tiles_triton import (
    NUMBERS_OF_TILE,
    WARPS,
    flashmoe_packed_tiles_triton,
    list_of_tiles,
    most_tiles,
    numbers,
)
from flashmoe_science.ops.attention.problem import AttentionProblem, head_parts, padded_head_dim
from flashmoe_science.ops.attention.split_triton import CacheLaunch, results_of, shapes_of_results
from flashmoe_science.ops.attention.wide_gluon_sm90 import (
    CHUNK,
    descriptor_of,
    in_parts,
    moved_in_warp,
    no_wide_output,
    packed,
    start_wide_output,
    wide_rescaled,
)
from flashmoe_science.ops.board_gluon import give, make_board, take
from flashmoe_science.ops.descriptors import RAGGED_ROWS, Tile, ragged, template
from flashmoe_science.ops.gluon_bridge import tma_load, tma_store
from flashmoe_science.ops.launch import Build, Encoder, Grid, Pointer, argument, can_start_early, cdiv
from flashmoe_science.ops.plan import Cache

NAME = "fwd_gluon_sm90"
# Not specialised on: a new batch or length must not compile anew.
SIZES = ("heads", "group", "seqlen_q", "seqlen_k", "causal_offset", "tiles_m", "heads_all", "pair_rounds")
SERVED = ("softcap", "sinks", "alibi", "boolmask", "bias", "packed")
NUMBERS = gl.constexpr(NUMBERS_OF_TILE)
ROWS = 64  # query rows of one consumer: the M of a warpgroup's matrix instruction
PRODUCER_REGISTERS = 24  # the least that a warpgroup may keep
FULL_HEAD = 512  # queries
MOST_HEADS = 8  # of packed sequences in a consumer's rows: the swizzle of shared memory repeats with eight rows
SHARED_BYTES = 226 << 10  # for tiles: a block may have 227 KB, and its barriers take little of the last one
GROWTH = gl.constexpr(8.0)  # of a row's maximum, as a power of two, at which O is rescaled; where smaller it keeps its scale
LAZY_ABOVE = gl.constexpr(64)  # columns of O: for fewer the rescaling costs less than the vote and the branch
# Keys, and tiles for each processor, from which on three consumers are the fastest for causal heads of up to 64 columns.
MANY_KEYS, MANY_ROUNDS = 3072, 8
# By how much a program of more consumers is faster a row than one of fewer, where both have work for the whole GPU: if the rows
# of the busiest processor differ by more, they decide.
TRIO_GAIN, RAGGED_GAIN, PAIR_GAIN, CAUSAL_PAIR_GAIN = 1.1, 1.15, 1.3, 1.5
# How tiles of queries are dealt out. The last rounds of pairs go out as single tiles where a head has many: the few of a short
# one would be spread over too many programs. With fewer tiles they do so for three consumers, and where whole rounds would
# waste much, but not where several programs share a processor, unless all tiles cost about the same.
TILES, PAIRS, PAIRS_THEN_TILES = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
LAST_ROUNDS, MANY_TILES, SOME_TILES, MUCH_WASTE = 3, 32, 12, 0.05
FEW_ROUNDS, MOST_WASTE = 4, 0.15  # of so few rounds so much is not wasted, however few tiles a head has
MANY_EACH = 4  # times as many keys of the longest sequence as queries, from which on a deeper ring is worth its memory
EVEN_KEYS = gl.constexpr(4)  # times as many keys of a sequence as queries: its tiles cost about the same
EVEN = 2  # times as many keys before the diagonal as there are queries


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
def _key_tiles(first_row, rows, seqlen_k, causal_offset, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, ALIGNED: gl.constexpr):
    """Tiles of keys that rows [first_row, first_row + rows) look at: at least one, so that every row gets a result, and two
    where the diagonal may cross as many: the first may hold no key that they see."""
    end = seqlen_k
    if CAUSAL:
        end = gl.minimum(end, first_row + rows + causal_offset)
    return gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 2 if CAUSAL and not ALIGNED else 1)


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _at(place, row, column):
    """The coordinates of a row and a column in a descriptor. ``place``: batch and head; of packed sequences the head, the
    sequence's end and its rows, of which ``row`` is one (``descriptors.ragged``)."""
    if len(place) == 2:
        return [place[0], place[1], row, column]
    else:
        return [RAGGED_ROWS, place[1], place[0], RAGGED_ROWS - place[2] + row, column]


@gluon.jit
def _load(descs, place, row, full, smem, stage):
    """Start the copies of all parts of a tile to a stage; ``full`` completes with the last of them."""
    if len(descs) == 1:
        mbarrier.expect(full, descs[0].block_type.nbytes)
    else:
        mbarrier.expect(full, descs[0].block_type.nbytes + descs[1].block_type.nbytes)
    tma_load(descs[0], _at(place, row, 0), full, smem[0].index(stage))
    if len(descs) == 2:
        tma_load(descs[1], _at(place, row, descs[0].block_type.shape[-1]), full, smem[1].index(stage))


@gluon.jit
def _load_chunks(desc, place, row, full, smem, stage, CHUNKS: gl.constexpr):
    """``_load`` of a tile that lies in chunks of columns side by side; of one chunk too."""
    mbarrier.expect(full, desc.block_type.nbytes * CHUNKS)
    for n in gl.static_range(CHUNKS):
        tma_load(desc, _at(place, row, n * desc.block_type.shape[-1]), full, smem.index(stage * CHUNKS + n))


@gluon.jit
def _fill(
    q_descs, k_descs, v_desc, memory, barriers, place_q, place_k, first_row, turn, tiles_n, stage_k, phase_k, stage_v, phase_v,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Issue the copies of one tile of queries and of the tiles of keys that it sees."""
    q_smem, k_smem, v_smem, o_smem = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    QUERIES: gl.constexpr = q_smem[0].shape[-2]
    STAGES_Q: gl.constexpr = q_smem[0].shape[0] // CONSUMERS
    STAGES_V: gl.constexpr = v_full.shape[0]
    CHUNKS: gl.constexpr = v_smem[0].shape[0] // STAGES_V
    BLOCK_N: gl.constexpr = k_smem[0].shape[-2]
    for consumer in gl.static_range(CONSUMERS):
        slot = turn % STAGES_Q * CONSUMERS + consumer
        mbarrier.wait(q_empty.index(slot), (turn // STAGES_Q & 1) ^ 1)
        _load(q_descs, place_q, first_row + consumer * QUERIES, q_full.index(slot), q_smem, slot)
    # In the order in which consumers ask: K of a tile before V of the tile before it.
    for i in range(tiles_n + 1):
        if i < tiles_n:
            mbarrier.wait(k_empty.index(stage_k), phase_k ^ 1)
            _load(k_descs, place_k, (tiles_n - 1 - i) * BLOCK_N, k_full.index(stage_k), k_smem, stage_k)
            stage_k, phase_k = _advance(stage_k, phase_k, k_smem[0].shape[0])
        if i > 0:
            mbarrier.wait(v_empty.index(stage_v), phase_v ^ 1)
            _load_chunks(v_desc, place_k, (tiles_n - i) * BLOCK_N, v_full.index(stage_v), v_smem[0], stage_v, CHUNKS)
            stage_v, phase_v = _advance(stage_v, phase_v, STAGES_V)
    return stage_k, phase_k, stage_v, phase_v


@gluon.jit
def _produce(
    q_descs, k_descs, v_desc, memory, barriers, work,
    CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, ALIGNED: gl.constexpr, DEAL: gl.constexpr,
):  # fmt: skip
    """The producer: one warp that issues every copy from device memory."""
    sizes, tiles, board = work
    heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds = sizes
    HEADS: gl.constexpr = memory[0][0].shape[-3]  # in a tile of queries
    QUERIES: gl.constexpr = memory[0][0].shape[-2]  # of a consumer
    BLOCK_N: gl.constexpr = memory[1][0].shape[-2]
    stage_k = gl.to_tensor(0)
    phase_k = gl.to_tensor(0)
    stage_v = gl.to_tensor(0)
    phase_v = gl.to_tensor(0)
    turn = gl.to_tensor(0)  # tiles of queries done so far
    if tiles is None:
        for step in range(_steps_of_program(tiles_m, heads_all, pair_rounds, DEAL)):
            has_work, tile_m, head_all = _piece(step, tiles_m, heads_all, pair_rounds, CAUSAL, DEAL)
            if has_work:
                batch = head_all // heads
                head = head_all % heads
                first_row = tile_m * (CONSUMERS * QUERIES)
                tiles_n = _key_tiles(first_row, CONSUMERS * QUERIES, seqlen_k, causal_offset, BLOCK_N, CAUSAL, ALIGNED)
                stage_k, phase_k, stage_v, phase_v = _fill(
                    q_descs, k_descs, v_desc, memory, barriers, (batch, head), (batch, head // group), first_row, turn, tiles_n,
                    stage_k, phase_k, stage_v, phase_v, CONSUMERS,
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
            tiles_n = _key_tiles(first_row, CONSUMERS * QUERIES, keys, keys - rows, BLOCK_N, CAUSAL, True)
            stage_k, phase_k, stage_v, phase_v = _fill(
                q_descs, k_descs, v_desc, memory, barriers, (head, end_q, rows), (head // group, end_k, keys), first_row, turn,
                tiles_n, stage_k, phase_k, stage_v, phase_v, CONSUMERS,
            )  # fmt: skip
            turn += 1
            index = gl.num_programs(0) + gl.atomic_add(tiles, 1, sem="relaxed")
        give(board, turn, (-1, 0, 0, 0, 0, 0), one)


@gluon.jit
def _before(s, limit):
    """Which columns of scores are before ``limit``, one number or [rows, 1].

    Of a column's number, the part that differs between a thread's registers is a constant to the compiler. The part that
    differs between threads is taken from the limit: two subtractions a thread, and for each score a comparison with a constant.
    With numbers of columns in registers the assembler also orders the loop over keys to save registers, which took 9%.
    """
    column = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)
    return (column & ~6) < limit - (column & 6)  # a row's four threads hold two columns of eight each


@gluon.jit
def _mask(s, first_key, first_row, seqlen_k, causal_offset, QUERIES: gl.constexpr, CAUSAL: gl.constexpr):
    """-inf where a key lies past the end or, when causal, past what its row may see. ``QUERIES``: after so many rows come the
    same queries of the next head."""
    limit = seqlen_k - first_key
    if CAUSAL:
        row = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        if s.shape[0] > QUERIES:
            row = row % QUERIES
        row = first_row + row
        limit = gl.expand_dims(gl.minimum(row + causal_offset + 1 - first_key, limit), 1)
    return gl.where(_before(s, limit), s, float("-inf"))


@gluon.jit
def _capped(s, scale):
    """(tanh(x) - 1) / 2 of the scores over the cap: -1 / (1 + e^(2 x)), with ``scale`` from a product Q K^T to log2 of e^(2 x).

    The softmax takes it times twice the cap: scores less the cap, which changes their maximum alone. Two instructions of the
    special-function unit and two others. A score is off by 2^-21 of the cap at the most, however small it is; what a softmax
    makes of scores follows from their differences.
    """
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [-1.0 - gl.exp2(s * scale)], gl.float32, True, 1
    )


@gluon.jit
def _softmax_step(s, row_max, scale_log2, MASKED: gl.constexpr, LAZY: gl.constexpr):
    """One online-softmax step: probabilities, the new maximum, and the factor by which older sums and output must shrink.

    Where LAZY, the maximum is one within a factor of 2^GROWTH: the old one stays until a score exceeds it by more, and the
    factor is exactly 1. Probabilities are at the most 2^GROWTH then, which the 16-bit types and fp32 sums hold.

    Maxima are kept scaled. Scaled anew in each step, the old one would meet the new one in a fused multiply-add that does not
    round it: the factor would miss 1 by the rounding error where the maximum stays, and in every step by the same.
    """
    # Pairs first, then columns, then the four threads of a row: a third of the dependent steps of a plain reduction.
    pairs = gl.max(s.reshape([s.shape[0], s.shape[1] // 8, 4, 2]), 3)
    tile_max = gl.convert_layout(gl.max(gl.max(pairs, 1), 1), row_max.type.layout)
    if LAZY:  # NaN is not above: the old maximum stays where both are -inf or the tile's is NaN, as with gl.maximum
        tile_max *= scale_log2
        new_max = gl.where(tile_max - row_max > GROWTH, tile_max, row_max)
    else:
        new_max = gl.maximum(row_max, tile_max * scale_log2)
    shift = new_max
    if MASKED:  # a row may have seen no key yet: subtract 0 then, since -inf - -inf is NaN
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(shift, 1))
    return p, new_max, gl.exp2(row_max - shift)


@gluon.jit
def _log2(x):
    """log2 of a sum of exponentials: 0, NaN, or 1 and more. The hardware's is off by 2^-22 of its value, 2e-6 at 8192 keys, so
    it is asked for the mantissa's alone."""
    bits = x.to(gl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(gl.float32, bitcast=True)
    return gl.where(x > 0.0, ((bits >> 23) - 127).to(gl.float32) + gl.log2(mantissa), gl.log2(x))  # else 0 or NaN


@gluon.jit
def _with_sink(sink, row_max, row_sum):
    """The maximum and the sum with a logit more, and by what to scale what was summed before."""
    sink = sink.to(gl.float32) * 1.4426950408889634
    new_max = gl.maximum(row_max, sink)
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    shrink = gl.exp2(row_max - shift)
    return new_max, row_sum * shrink + gl.exp2(sink - shift), shrink


@gluon.jit
def _own_sums(p):
    """Sums over the columns that each thread holds; the four threads that share a row meet only once, after the last tile."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _tile(smem, stage):
    """What a stage of shared memory holds, as a matrix."""
    return smem.index(stage).reshape([smem.shape[-3] * smem.shape[-2], smem.shape[-1]])


@gluon.jit
def _start_scores(q_smem, slot, k_smem, stage):
    """Start S = Q K^T: an accumulator in flight, of as many products as there are parts."""
    ROWS: gl.constexpr = q_smem[0].shape[-3] * q_smem[0].shape[-2]
    BLOCK_N: gl.constexpr = k_smem[0].shape[-2]
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    s = warpgroup_mma(_tile(q_smem[0], slot), _tile(k_smem[0], stage).permute((1, 0)), s, use_acc=False, is_async=True)
    if len(k_smem) == 2:
        s = warpgroup_mma(_tile(q_smem[1], slot), _tile(k_smem[1], stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _start_output(p, o, v_smem, stage):
    """Start O += P V in each part of O: accumulators in flight."""
    first = warpgroup_mma(p, _tile(v_smem[0], stage), o[0], is_async=True)
    if len(o) == 2:
        same = gl.convert_layout(p, gl.DotOperandLayout(0, o[1].type.layout, 2))  # no data move
        return first, warpgroup_mma(same, _tile(v_smem[1], stage), o[1], is_async=True)
    else:
        return (first,)


@gluon.jit
def _wait_for_output(tokens):
    """O as it is once every product has completed."""
    o = warpgroup_mma_wait(0, tokens)
    if len(tokens) == 1:  # it stands alone then
        return (o,)
    else:
        return o


@gluon.jit
def _scaled(o, factor):
    """Each part or piece of O with its rows times ``factor``."""
    scaled = (o[0] * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o[0].type.layout)), 1),)
    for n in gl.static_range(1, len(o)):
        rows = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o[n].type.layout)), 1)
        scaled = scaled + (o[n] * rows,)  # type: ignore[assignment]
    return scaled


def _rescale_asm(count: int) -> str:
    """PTX for a thread's ``count`` products of O and factors, which a warp skips where all of its factors are 1.

    A thread holds two rows, in turn two numbers of each. The operands are the products, which stand where O stood, then O,
    then the factors. A factor of NaN is not 1 (``neu``).
    """
    first, second = 2 * count, 2 * count + 2
    return "\n".join(
        [
            "{",
            ".reg .pred moved;",
            f"setp.neu.f32 moved, ${first}, 0f3F800000;",
            f"setp.neu.or.f32 moved, ${second}, 0f3F800000, moved;",
            "vote.sync.any.pred moved, moved, 0xffffffff;",
            "@!moved bra DONE;",
            *(f"mul.f32 ${i}, ${i}, ${first + i};" for i in range(count)),
            "DONE:",
            "}",
        ]
    )


def _rescale_operands(count: int) -> str:
    return ",".join(["=&f"] * count + [str(i) for i in range(count)] + ["f"] * count)


_RESCALE = gl.constexpr({count: _rescale_asm(count) for count in (8, 16, 32, 64)})
_RESCALE_OPERANDS = gl.constexpr({count: _rescale_operands(count) for count in (8, 16, 32, 64)})


@gluon.jit
def _part_rescaled(o, factor):
    """A part of O with its rows times ``factor``; a warp whose factors are all 1 leaves it as it is.

    In assembly since Gluon has no vote of a warp: its reductions end in a barrier of the warpgroup, and a branch on one would
    wait for the other warps in every step. Not pure: threads that vote must meet, so the compiler must not move it.
    """
    COUNT: gl.constexpr = min(64, o.shape[1] // 2)  # numbers of a thread in one piece of assembly
    factors, same = gl.broadcast(gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout)), 1), o)
    return gl.inline_asm_elementwise(_RESCALE[COUNT], _RESCALE_OPERANDS[COUNT], [o, factors], gl.float32, False, COUNT)


@gluon.jit
def _rescaled(o, factor, LAZY: gl.constexpr):
    """What ``_scaled`` gives; where LAZY, a warp skips it whose factors are all 1."""
    if not LAZY:
        return _scaled(o, factor)
    elif len(o) == 2:
        return _part_rescaled(o[0], factor), _part_rescaled(o[1], factor)
    else:
        return (_part_rescaled(o[0], factor),)


@gluon.jit
def _no_output(v_smem, ROWS: gl.constexpr):
    """O before the first product."""
    first: gl.constexpr = v_smem[0].shape[-1]
    o = (gl.zeros([ROWS, first], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, first, 16])),)
    if len(v_smem) == 2:
        second: gl.constexpr = v_smem[1].shape[-1]
        return o[0], gl.zeros([ROWS, second], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, second, 16]))
    else:
        return o


@gluon.jit
def _store(o_descs, place, row, o, o_smem, slot):
    """Start the copies of all parts of O to device memory, by way of shared memory that holds nothing else."""
    out = o_smem[0].index(slot)
    out.reshape(o[0].shape).store(o[0].to(o_smem[0].dtype))
    if len(o) == 2:
        rest = o_smem[1].index(slot)
        rest.reshape(o[1].shape).store(o[1].to(o_smem[1].dtype))
    fence_async_shared()
    tma_store(o_descs[0], _at(place, row, 0), out)
    if len(o) == 2:
        tma_store(o_descs[1], _at(place, row, o[0].shape[1]), rest)


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
        return _start_output(p, o, v_smem, stage)
    else:
        STAGE: gl.constexpr = v_smem[0].shape[0] // STAGES * v_smem[0].shape[-2] * v_smem[0].shape[-1] * 2  # bytes
        return start_wide_output(p, o, v_low + stage * (STAGE >> 4), v_smem[0].dtype)


@gluon.jit
def _changed(s, scales, bias, drawn, of_rows, first_key):
    """Scores with what modes make of them, and by what a softmax is to scale them."""
    if scales[1] is not None:
        s = _capped(s, scales[1])
    scale_log2 = scales[0]
    if bias[0] is not None:
        s, scale_log2 = biased(s, drawn, scale_log2)
    if bias[1] is not None:
        s, scale_log2 = with_alibi(s, scale_log2, of_rows, first_key)
    return s, scale_log2


@gluon.jit
def _step(
    i, slot, memory, v_low, barriers, stage_k, phase_k, stage_v, phase_v,
    p, o, row_max, row_sum, lost, scales, bias, of_rows, tiles_n, first_row, seqlen_k, causal_offset,
    MASKED: gl.constexpr, COMPENSATED: gl.constexpr, LAZY: gl.constexpr,
):  # fmt: skip
    """The ``i``-th tile of keys, counted from the last one: its S is computed beside P V of the one before.

    The assembler would sink the softmax below the wait for P V, and with it the overlap; it does not move it across the
    branch of an mbarrier's wait. Hence the wait on a barrier that has long completed.
    """
    q_smem, k_smem, v_smem, o_smem = memory
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    STAGES_K: gl.constexpr = k_smem[0].shape[0]
    STAGES_V: gl.constexpr = v_full.shape[0]
    BLOCK_N: gl.constexpr = k_smem[0].shape[-2]
    drawn = bias[0]
    if bias[0] is not None:
        drawn = start_bias(of_rows, (tiles_n - 1 - i) * BLOCK_N, seqlen_k, BLOCK_N, MASKED)
    mbarrier.wait(k_full.index(stage_k), phase_k)
    s_token = _start_scores(q_smem, slot, k_smem, stage_k)
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o_tokens = _start_values(p, o, v_smem, stage_v, v_low, STAGES_V)
    s = warpgroup_mma_wait(1, [s_token])
    mbarrier.arrive(k_empty.index(stage_k))
    stage_k, phase_k = _advance(stage_k, phase_k, STAGES_K)
    s, scale_log2 = _changed(s, scales, bias, drawn, of_rows, (tiles_n - 1 - i) * BLOCK_N)
    if MASKED:
        s = _mask(s, (tiles_n - 1 - i) * BLOCK_N, first_row, seqlen_k, causal_offset, q_smem[0].shape[-2], True)
    HIDES: gl.constexpr = MASKED or bias[0] is not None
    p32, row_max, rescale = _softmax_step(s, row_max, scale_log2, HIDES, LAZY)
    shrink = gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout)), 1)
    before = row_sum * shrink
    more = gl.convert_layout(_own_sums(p32), row_sum.type.layout)
    if COMPENSATED:  # for what rounding takes (Kahan 1965): else a sum of 16k is off by 2e-6, all of the error of an LSE
        more -= lost * shrink
    row_sum = before + more
    if COMPENSATED:
        lost = (row_sum - before) - more
    if v_low is not None:
        moved = moved_in_warp(rescale, LAZY)
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o = _wait_for_output(o_tokens)
    mbarrier.arrive(v_empty.index(stage_v))
    stage_v, phase_v = _advance(stage_v, phase_v, STAGES_V)
    if v_low is not None:
        o = wide_rescaled(o, rescale, moved)
    else:
        o = _rescaled(o, rescale, LAZY)
    return _carried(p32, o, v_smem, v_low), o, row_max, row_sum, lost, stage_k, phase_k, stage_v, phase_v


@gluon.jit
def _attend(
    output, memory, barriers, sizes, sequence, top_row, head_all, turn, stage_k, phase_k, stage_v, phase_v,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, ALIGNED: gl.constexpr, EVEN_K: gl.constexpr,
    WRITE_LSE: gl.constexpr, OWN_OUT: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """A consumer's 64 rows of one tile of queries, of ``head_all`` and, of packed sequences, of heads after it that share its
    keys. ``sequence``: of packed ones its number, where its queries end among all of them, how many it has, and how many keys;
    None else."""
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
    HIDES: gl.constexpr = CAUSAL or not EVEN_K or bias[0] is not None  # whether the first tile may hold no key that a row sees
    PACKED: gl.constexpr = sequence is not None
    lse_rows = seqlen_q
    if PACKED:
        seqlen_q, seqlen_k = sequence[2], sequence[3]
        causal_offset = seqlen_k - seqlen_q
    first_row = top_row + CONSUMER * QUERIES
    tiles_n = _key_tiles(top_row, CONSUMERS * QUERIES, seqlen_k, causal_offset, BLOCK_N, CAUSAL, ALIGNED or PACKED)
    begin = gl.to_tensor(0)
    if CAUSAL:
        # Tiles that only the later consumers of this program need: let them pass.
        begin = tiles_n - _key_tiles(first_row, QUERIES, seqlen_k, causal_offset, BLOCK_N, CAUSAL, ALIGNED or PACKED)
        for skipped in range(begin):
            mbarrier.wait(k_full.index(stage_k), phase_k)
            mbarrier.arrive(k_empty.index(stage_k))
            stage_k, phase_k = _advance(stage_k, phase_k, STAGES_K)
            mbarrier.wait(v_full.index(stage_v), phase_v)
            mbarrier.arrive(v_empty.index(stage_v))
            stage_v, phase_v = _advance(stage_v, phase_v, STAGES_V)

    # The first tile, alone.
    of_rows = bias[0]  # where each row's bias begins; of ALiBi the head's slope and each row's own key
    drawn = bias[0]
    if bias[0] is not None:
        of_rows = bias_rows(bias, head_all // heads, head_all % heads, first_row, seqlen_q, ROWS, UNIT, s_layout)
        first_key = (tiles_n - 1 - begin) * BLOCK_N
        drawn = start_bias(of_rows, first_key, seqlen_k, BLOCK_N, CAUSAL or not EVEN_K)
    if bias[1] is not None:
        batch = head_all // heads
        if PACKED:
            batch = sequence[0]
        slope = gl.load(bias[1] + batch * bias[2] + head_all % heads) * 1.4426950408889634
        of_rows = (slope, first_row + seqlen_k - seqlen_q + gl.arange(0, ROWS, row_layout))
    slot = turn % STAGES_Q * CONSUMERS + CONSUMER
    mbarrier.wait(q_full.index(slot), turn // STAGES_Q & 1)
    mbarrier.wait(k_full.index(stage_k), phase_k)
    s = warpgroup_mma_wait(0, [_start_scores(q_smem, slot, k_smem, stage_k)])
    mbarrier.arrive(k_empty.index(stage_k))
    stage_k, phase_k = _advance(stage_k, phase_k, STAGES_K)
    s, scale_log2 = _changed(s, scales, bias, drawn, of_rows, (tiles_n - 1 - begin) * BLOCK_N)
    if CAUSAL or not EVEN_K:
        s = _mask(s, (tiles_n - 1 - begin) * BLOCK_N, first_row, seqlen_k, causal_offset, QUERIES, CAUSAL)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    p32, row_max, unused = _softmax_step(s, row_max, scale_log2, HIDES, False)
    row_sum = _own_sums(p32)
    lost = gl.zeros_like(row_sum)
    if v_low is not None:
        o = no_wide_output(ROWS, COLUMNS, BLOCK_N)
    else:
        o = _no_output(v_smem, ROWS)
    p = _carried(p32, o, v_smem, v_low)

    # The others: one more with a mask where the diagonal may cross two tiles, then without.
    first = begin + 1
    if CAUSAL and not ALIGNED and PACKED:  # where its own lengths have it so
        masked = gl.minimum(first + (causal_offset % QUERIES != 0).to(gl.int32), tiles_n)
        for i in range(first, masked):
            p, o, row_max, row_sum, lost, stage_k, phase_k, stage_v, phase_v = _step(
                i, slot, memory, v_low, barriers, stage_k, phase_k, stage_v, phase_v,
                p, o, row_max, row_sum, lost, scales, bias, of_rows, tiles_n, first_row, seqlen_k, causal_offset,
                True, WRITE_LSE, LAZY,
            )  # fmt: skip
        first = masked
    elif CAUSAL and not ALIGNED:
        p, o, row_max, row_sum, lost, stage_k, phase_k, stage_v, phase_v = _step(
            first, slot, memory, v_low, barriers, stage_k, phase_k, stage_v, phase_v,
            p, o, row_max, row_sum, lost, scales, bias, of_rows, tiles_n, first_row, seqlen_k, causal_offset,
            True, WRITE_LSE, LAZY,
        )  # fmt: skip
        first += 1
    for i in range(first, tiles_n):
        p, o, row_max, row_sum, lost, stage_k, phase_k, stage_v, phase_v = _step(
            i, slot, memory, v_low, barriers, stage_k, phase_k, stage_v, phase_v,
            p, o, row_max, row_sum, lost, scales, bias, of_rows, tiles_n, first_row, seqlen_k, causal_offset,
            False, WRITE_LSE, LAZY,
        )  # fmt: skip
    if OWN_OUT:
        mbarrier.arrive(q_empty.index(slot))
    mbarrier.wait(v_full.index(stage_v), phase_v)
    o = _wait_for_output(_start_values(p, o, v_smem, stage_v, v_low, STAGES_V))
    mbarrier.arrive(v_empty.index(stage_v))
    stage_v, phase_v = _advance(stage_v, phase_v, STAGES_V)

    # A row that sees no key has a sum of 0: its output is 0 and its log-sum-exp log(0) = -inf.
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
    if scales[1] is not None and (WRITE_LSE or sinks is not None):
        row_max += 0.5 * scales[0]  # what ``_capped`` leaves out
    inverse = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
    if sinks is not None:
        sinks_at = sinks + head_all % heads
        if HEADS > 1:
            sinks_at += gl.arange(0, ROWS, row_layout) // QUERIES
        row_max, row_sum, shrink = _with_sink(gl.load(sinks_at), row_max, row_sum)
        inverse = shrink / gl.where(row_sum == 0.0, 1.0, row_sum)
    o = _scaled(o, inverse)
    if v_low is not None:
        o = in_parts(o, o_descs[0].block_type.shape[-1])
    tma.store_wait(0)  # the copy of the last tile's output has left shared memory
    if PACKED:
        place = (head_all, sequence[1], seqlen_q)
    else:
        place = (head_all // heads, head_all % heads)  # type: ignore[assignment]
    if OWN_OUT:
        _store(o_descs, place, first_row, o, o_smem, CONSUMER)
    else:
        _store(o_descs, place, first_row, o, o_smem, slot)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(slot))
    if WRITE_LSE:
        row = gl.arange(0, ROWS, row_layout)
        shift = gl.where(row_max == float("-inf"), 0.0, row_max)
        lse = (shift + _log2(row_sum)) * 0.6931471805599453
        lse_at = lse_base + head_all.to(gl.int64) * lse_rows
        if PACKED:
            lse_at += sequence[1] - seqlen_q + (row // QUERIES).to(gl.int64) * lse_rows
            row = row % QUERIES
        row = first_row + row
        gl.store(lse_at + row, lse, mask=row < seqlen_q)
    return stage_k, phase_k, stage_v, phase_v


@gluon.jit
def _consume(
    output, memory, barriers, work,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, ALIGNED: gl.constexpr, EVEN_K: gl.constexpr,
    WRITE_LSE: gl.constexpr, OWN_OUT: gl.constexpr, DEAL: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 rows of every tile of queries that this program works on."""
    sizes, tiles, board = work
    heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds = sizes
    QUERIES: gl.constexpr = memory[0][0].shape[-2]
    stage_k = gl.to_tensor(0)
    phase_k = gl.to_tensor(0)
    stage_v = gl.to_tensor(0)
    phase_v = gl.to_tensor(0)
    turn = gl.to_tensor(0)  # tiles of queries done so far
    if tiles is None:
        for step in range(_steps_of_program(tiles_m, heads_all, pair_rounds, DEAL)):
            has_work, tile_m, head_all = _piece(step, tiles_m, heads_all, pair_rounds, CAUSAL, DEAL)
            if has_work:
                stage_k, phase_k, stage_v, phase_v = _attend(
                    output, memory, barriers, sizes, None, tile_m * (CONSUMERS * QUERIES), head_all, turn,
                    stage_k, phase_k, stage_v, phase_v,
                    CONSUMER, CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, UNIT,
                )  # fmt: skip
                turn += 1
    else:
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        head, batch, top_row, end_q, rows, keys = take(board, turn, one)
        while head >= 0:
            stage_k, phase_k, stage_v, phase_v = _attend(
                output, memory, barriers, sizes, (batch, end_q, rows, keys), top_row, head, turn,
                stage_k, phase_k, stage_v, phase_v,
                CONSUMER, CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, UNIT,
            )  # fmt: skip
            turn += 1
            head, batch, top_row, end_q, rows, keys = take(board, turn, one)
    tma.store_wait(0)


@gluon.jit
def _parts(desc, rest):
    """The descriptors of the parts of a tensor, of which the second may be None."""
    if rest is None:
        return (desc,)
    else:
        return desc, rest


@gluon.jit
def _memory_of(descs, STAGES: gl.constexpr):
    """Shared memory for so many tiles of each part."""
    first = gl.allocate_shared_memory(descs[0].dtype, [STAGES] + descs[0].block_type.shape, descs[0].layout)
    if len(descs) == 2:
        return first, gl.allocate_shared_memory(descs[1].dtype, [STAGES] + descs[1].block_type.shape, descs[1].layout)
    else:
        return (first,)


@gluon.jit(do_not_specialize=(*SIZES, *STRIDES))
def flashmoe_fwd_gluon_sm90(
    q_desc, k_desc, v_desc, o_desc, q_rest, k_rest, v_rest, o_rest, lse_base, softmax_scale, softcap, tiles,
    sinks, slopes, bias, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_m,
    heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES_Q: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
    CAUSAL: gl.constexpr, ALIGNED: gl.constexpr, EVEN_K: gl.constexpr, WRITE_LSE: gl.constexpr, OWN_OUT: gl.constexpr,
    DEAL: gl.constexpr, UNIT: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    q_descs, k_descs = _parts(q_desc, q_rest), _parts(k_desc, k_rest)
    o_descs = _parts(o_desc, o_rest)
    CHUNKS: gl.constexpr = 1 if o_rest is None else (o_desc.block_type.shape[-1] + o_rest.block_type.shape[-1] + 63) // 64
    q_smem = _memory_of(q_descs, STAGES_Q * CONSUMERS)
    k_smem = _memory_of(k_descs, STAGES_K)
    v_smem = _memory_of((v_desc,), STAGES_V * CHUNKS)
    if OWN_OUT:
        o_smem = _memory_of(o_descs, CONSUMERS)
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
    if softcap is not None:  # of what ``_capped`` gives, and of the scores in it
        scales = (2.0 * softcap * 1.4426950408889634, 2.0 * scale_log2 / softcap)

    memory = (q_smem, k_smem, v_smem, o_smem)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds)
    work = (sizes, tiles, v_rest)  # without a list of tiles no board: None
    if tiles is not None:
        work = (sizes, tiles, board)
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
                (_produce, (q_descs, k_descs, v_desc, memory, barriers, work, CONSUMERS, CAUSAL, ALIGNED, DEAL)),
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
                (_produce, (q_descs, k_descs, v_desc, memory, barriers, work, CONSUMERS, CAUSAL, ALIGNED, DEAL)),
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
                (_produce, (q_descs, k_descs, v_desc, memory, barriers, work, CONSUMERS, CAUSAL, ALIGNED, DEAL)),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )


def supports(problem: AttentionProblem, device: Device) -> str | None:
    return why_not_copied(problem, device) or why_not_capped(problem) or unserved(problem.modes, SERVED)


_Shape = dict[str, int]  # a config without what ``_scheduled`` adds


def configs(problem: AttentionProblem, device: Device) -> tuple[Config, ...]:
    """Shapes of the program by head dimension and length, the best guess first (docs/notes/fwd-gluon-sm90.md)."""
    assert device is not None
    width = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    if _is_packed(problem):
        shapes = _packed_shapes(problem, width)
    elif width <= 64:
        shapes = _narrow_shapes(problem, device)
    elif width <= 128:
        shapes = _middle_shapes(problem, device)
    else:
        shapes = _wide_shapes(problem)
    if problem.modes.bias != "none":
        shapes = _biased_shapes(problem, shapes)
    return tuple(_scheduled(problem, device, shape) for shape in shapes)


def suits(problem: AttentionProblem, gpu: Gpu) -> bool:
    """A consumer's 64 rows should be full, and the tiles fill the GPU or be many a head; below that the portable kernel's thin
    tiles win."""
    return fills_tiles(problem, gpu) or problem.seqlen_q >= FULL_HEAD


def _narrow_shapes(problem: AttentionProblem, gpu: Gpu) -> tuple[_Shape, ...]:
    lone, thin = _shape(1, 128, 2, 2, occupancy=2), _shape(1, 64, 2, 3, occupancy=3)
    duo, trio = _shape(2, 128, 2, 2), _shape(3, 128, 1, 2)
    many = problem.seqlen_k >= MANY_KEYS and _tiles_each(problem, gpu, trio) >= MANY_ROUNDS
    if _ragged(problem):
        trio = _shape(3, 128, 2, 2)
        if problem.causal:
            return (trio, duo) if many or problem.seqlen_k < 1024 else (duo, trio)
        return (duo, trio) if _rows_ratio(problem, gpu, trio, duo) > RAGGED_GAIN else (trio, duo)
    if problem.causal and many:
        return trio, lone, thin
    if problem.causal:
        return (lone, thin) if problem.seqlen_k >= 2048 else (thin, lone)
    if problem.seqlen_q < 2048:
        return lone, duo, thin
    return (lone, trio, thin) if _rows_ratio(problem, gpu, trio, lone) > TRIO_GAIN else (trio, lone, thin)


def _middle_shapes(problem: AttentionProblem, gpu: Gpu) -> tuple[_Shape, ...]:
    pair, lone = _shape(2, 128, 2, 2), _shape(1, 64, 2, 2, occupancy=2)
    parts, causal = head_parts(problem.head_dim), problem.causal
    few = _rows_ratio(problem, gpu, pair, lone) > (CAUSAL_PAIR_GAIN if causal else PAIR_GAIN)
    if parts == head_parts(problem.head_dim_v) == (64, 16):
        return _shape(2, 128, 2, 2, stages_v=3), lone
    if parts == head_parts(problem.head_dim_v) == (64, 32):
        thin = _shape(1, 64, 1, 2, occupancy=3, own_out=0)
        few |= problem.seqlen_k < (1600 if causal else 1024)
        return (thin, pair) if few and not _ragged(problem) else (pair, thin)
    few |= problem.seqlen_k < 768 and causal
    return (lone, pair) if few and not _ragged(problem) else (pair, lone)


def _tiles_each(problem: AttentionProblem, gpu: Gpu, shape: _Shape) -> float:
    """Tiles of queries for each processor."""
    return problem.batch * problem.heads * cdiv(problem.seqlen_q, shape["consumers"] * ROWS) / gpu.sm_count


def _rows_ratio(problem: AttentionProblem, gpu: Gpu, shape: _Shape, other: _Shape) -> float:
    """Rows of queries that the busiest processor works through in tiles of a shape, by those in tiles of another."""
    rows, others = (ceil(_tiles_each(problem, gpu, one)) * one["consumers"] for one in (shape, other))
    return rows / others


def _wide_shapes(problem: AttentionProblem) -> tuple[_Shape, ...]:
    short, deep = _shape(2, 64, 1, 2, own_out=0), _shape(2, 64, 2, 3, stages_v=2, own_out=0)
    long, lone = _shape(2, 128, 1, 2, own_out=0), _shape(1, 64, 1, 2, occupancy=2, own_out=0)
    # Of 240 registers a thread the output takes half its width, the scores 64 at 128 keys, and P 32; a second mask spills then.
    if sum(head_parts(problem.head_dim_v)) <= 160 and _one_masked(problem) and _tile_bytes(problem, long) <= SHARED_BYTES:
        if _tile_bytes(problem, lone) > SHARED_BYTES // 2:
            return long, short
        return (lone, long) if problem.causal and problem.seqlen_k < 1280 and not _ragged(problem) else (long, lone)
    return (deep, short) if _tile_bytes(problem, deep) <= SHARED_BYTES else (short,)


def _packed_shapes(problem: AttentionProblem, width: int) -> tuple[_Shape, ...]:
    """By the longest sequence, as the others are not known: the shorter, the fewer rows and keys a tile should have."""
    if width <= 64:
        return _shape(1, 64, 2, 3, occupancy=3), _shape(1, 128, 2, 2, occupancy=2)
    if width > 128:
        return _wide_shapes(problem)
    pair, half, lone = _shape(2, 128, 2, 2), _shape(2, 64, 2, 4), _shape(1, 64, 2, 2, occupancy=2)
    if problem.seqlen_k >= MANY_EACH * problem.seqlen_q:  # few tiles share keys, which come from memory
        return _shape(2, 128, 1, 3, own_out=0), pair
    if problem.seqlen_q >= 2048:
        return pair, half
    return (half, pair, lone) if problem.seqlen_q >= 768 else (lone, half)


def _biased_shapes(problem: AttentionProblem, shapes: tuple[_Shape, ...]) -> tuple[_Shape, ...]:
    """Of the shapes those of at most two consumers, as three have no registers for a bias; O in Q's place where both do not fit
    beside what an additive one takes."""
    # A processor has 228 KB, of which a block takes up to 2 for its barriers and for itself.
    fit = [shape["occupancy"] * (_tile_bytes(problem, shape) + 2048) <= 228 << 10 for shape in shapes]
    shapes = tuple(shape if good else shape | {"own_out": 0} for shape, good in zip(shapes, fit, strict=True))
    return tuple(shape for shape in shapes if shape["consumers"] < 3)


def _ragged(problem: AttentionProblem) -> bool:
    """Whether rows do not begin at whole sectors of 32 bytes. Copies cost more then, so that tiles of more queries win."""
    return problem.head_dim % 16 > 0 or problem.head_dim_v % 16 > 0


def _one_masked(problem: AttentionProblem) -> bool:
    """Whether no tile of keys but the first needs a mask, whatever the lengths that share a config with these: of unequal ones
    some have the diagonal where it crosses two."""
    return not problem.causal or (problem.causal_offset == 0 and not _is_packed(problem))


def _shape(
    consumers: int,
    block_n: int,
    stages_q: int,
    stages: int,
    stages_v: int | None = None,
    occupancy: int = 1,
    own_out: int = 1,
) -> _Shape:
    return {
        "consumers": consumers,
        "block_n": block_n,
        "stages_q": stages_q,
        "stages_k": stages,
        "stages_v": stages_v or stages,
        "own_out": own_out,
        "occupancy": occupancy,
    }


def _tile_bytes(problem: AttentionProblem, shape: _Shape) -> int:
    """Bytes of shared memory of a program's tiles."""
    width, width_out = sum(head_parts(problem.head_dim)), sum(head_parts(problem.head_dim_v))
    width_v = _chunks(problem) * _chunk(problem)
    own_out = shape["own_out"] or not _out_fits_query(problem)
    keys = shape["block_n"] * (shape["stages_k"] * width + shape["stages_v"] * width_v)
    exchanged = shape["consumers"] * EXCHANGE_BYTES if problem.modes.bias == "additive" else 0
    return 2 * (keys + shape["consumers"] * ROWS * (shape["stages_q"] * width + own_out * width_out)) + exchanged


def _is_wide(problem: AttentionProblem) -> bool:
    """Whether V is not one tile, and the product the one of wide_gluon_sm90.py."""
    return len(head_parts(problem.head_dim_v)) > 1


def _chunk(problem: AttentionProblem) -> int:
    """Columns of V that one copy brings."""
    return CHUNK.value if _is_wide(problem) else padded_head_dim(problem.head_dim_v)


def _chunks(problem: AttentionProblem) -> int:
    return cdiv(problem.head_dim_v, _chunk(problem))


def _scheduled(problem: AttentionProblem, gpu: Gpu, shape: _Shape) -> Config:
    """Persistent and, when causal, in pairs, where there is enough work for that; else one tile, and one Q, a program. Packed
    sequences are dealt out tile by tile."""
    if _is_packed(problem):
        return Config(**shape, persistent=1, paired=0)
    config = Config(**shape, persistent=1, paired=int(problem.causal))
    pairs = problem.batch * problem.heads * cdiv(_tiles_m(problem, config), 2)
    if problem.causal and pairs < gpu.sm_count * shape["occupancy"]:
        return Config(**shape | {"stages_q": 1}, persistent=0, paired=0)
    return config


class _Variant(NamedTuple):
    """What a build is specialised on beside its config and its dtypes, and a call decides."""

    aligned: bool
    even_k: bool
    deal: int
    bias_unit: int


def _variant(problem: AttentionProblem | Sizes, config: Config, gpu: Gpu, bias_unit: int) -> _Variant:
    even_k = problem.seqlen_k % config["block_n"] == 0
    return _Variant(_aligned(problem), even_k, _deal(problem, config, gpu).value, bias_unit)


# Whatever the lengths: what they decide, their program finds out.
_PACKED = _Variant(aligned=False, even_k=False, deal=TILES.value, bias_unit=1)


def _is_packed(problem: AttentionProblem) -> bool:
    return problem.modes.lengths == "packed"


def _constexprs(problem: AttentionProblem, config: Config, variant: _Variant, write_lse: bool) -> dict[str, Any]:
    return {
        "CONSUMERS": config["consumers"],
        "BLOCK_N": config["block_n"],
        "STAGES_Q": config["stages_q"],
        "STAGES_K": config["stages_k"],
        "STAGES_V": config["stages_v"],
        "CAUSAL": problem.causal,
        "ALIGNED": variant.aligned,
        "EVEN_K": variant.even_k,
        "WRITE_LSE": write_lse,
        "OWN_OUT": bool(config["own_out"]) or not _out_fits_query(problem),
        "DEAL": variant.deal,
        "UNIT": variant.bias_unit,
        "CONSUMER_REGS": _consumer_registers(config),
        "PRODUCER_REGS": PRODUCER_REGISTERS,
    }


def _out_fits_query(problem: AttentionProblem) -> bool:
    """Whether the parts of a tile of O are the first of those of Q, so that they can take their place."""
    of_out = head_parts(problem.head_dim_v)
    return head_parts(problem.head_dim)[: len(of_out)] == of_out


def _threads(config: Config) -> int:
    return 128 * (config["consumers"] + 1)


def _registers(config: Config) -> int:
    """Registers a thread at launch: what the wanted number of resident blocks leaves, in steps of 8."""
    return 65536 // (config["occupancy"] * _threads(config)) // 8 * 8


def _consumer_registers(config: Config, producer: int = PRODUCER_REGISTERS) -> int:
    """Registers a consumer's thread once the producer's warpgroup has given its own back but ``producer`` a thread."""
    consumers = config["consumers"]
    return (_registers(config) * (consumers + 1) - producer) // consumers // 8 * 8


def _aligned(problem: AttentionProblem | Sizes) -> bool:
    """Whether the diagonal of a consumer's rows lies in one tile of keys, its first, so that no other needs a mask."""
    return problem.causal and problem.causal_offset % ROWS == 0


def _paired(problem: AttentionProblem | Sizes, config: Config) -> bool:
    return problem.causal and bool(config["paired"])


def _deal(problem: AttentionProblem | Sizes, config: Config, gpu: Gpu) -> gl.constexpr:
    if not _paired(problem, config):
        return TILES
    tiles_m = _tiles_m(problem, config)
    pairs = problem.batch * problem.heads * cdiv(tiles_m, 2)
    # Of processors: programs that share one even out each other's share.
    waste = 2 * cdiv(pairs, gpu.sm_count) * gpu.sm_count / (problem.batch * problem.heads * tiles_m) - 1.0
    if waste > MOST_WASTE and pairs <= FEW_ROUNDS * gpu.sm_count:
        return PAIRS_THEN_TILES
    some = config["consumers"] == 3 or (waste > MUCH_WASTE and (config["occupancy"] == 1 or _even(problem)))
    return PAIRS_THEN_TILES if tiles_m >= (SOME_TILES if some else MANY_TILES) else PAIRS


def _even(problem: AttentionProblem | Sizes) -> bool:
    """Whether so many keys are before the diagonal that all tiles of queries cost about the same."""
    return problem.causal_offset >= EVEN * problem.seqlen_q


def _pair_rounds(problem: AttentionProblem | Sizes, config: Config, programs: int) -> int:
    """Whole rounds of pairs that go out to so many programs before single tiles do."""
    pairs = problem.batch * problem.heads * cdiv(_tiles_m(problem, config), 2)
    return max(0, pairs // programs - LAST_ROUNDS)


def _tiles_m(problem: AttentionProblem | Sizes, config: Config) -> int:
    return cdiv(problem.seqlen_q, config["consumers"] * ROWS)


def _grid(problem: AttentionProblem | Sizes, config: Config, gpu: Gpu) -> tuple[int, int, int]:
    tiles_m, heads = _tiles_m(problem, config), problem.batch * problem.heads
    pairs = cdiv(tiles_m, 2)
    work = heads * (pairs if _paired(problem, config) else tiles_m)
    programs = gpu.sm_count * config["occupancy"]
    if not config["persistent"] or work <= programs:
        return work, 1, 1
    # Of an odd number of tiles the middle one stands alone. With one program fewer it goes round; else it might always come to
    # the same programs, which would idle for half of their time.
    if _paired(problem, config) and tiles_m % 2 and gcd(programs, pairs) > 1:
        programs -= 1
    return programs, 1, 1


def _tile_shapes(problem: AttentionProblem, config: Config) -> tuple[Tile | None, ...]:
    """Copies of Q, K, V and O, then of their second parts: None for each that has none. Those of packed sequences end where
    one does (``descriptors.ragged``)."""
    parts, of_v, of_out = head_parts(problem.head_dim), (_chunk(problem),), head_parts(problem.head_dim_v)
    of_q: Tile = (1, 1, ROWS)
    of_k: Tile = (1, 1, config["block_n"])
    if _is_packed(problem):
        heads = _heads_of_tile(problem)
        of_q, of_k = (1, 1, heads, ROWS // heads), (1, *of_k)
    tensors = ((of_q, parts), (of_k, parts), (of_k, of_v), (of_q, of_out))
    return tuple((*rows, parts[n]) if n < len(parts) else None for n in range(2) for rows, parts in tensors)


def _heads_of_tile(problem: AttentionProblem) -> int:
    """Query heads of one key head in a consumer's rows: few queries fill more of them so. ALiBi has a slope for a tile."""
    group = problem.heads // problem.heads_kv
    return min(group & -group, MOST_HEADS) if _is_packed(problem) and problem.modes.bias == "none" else 1


def _queries_of_tile(problem: AttentionProblem, config: Config) -> int:
    return config["consumers"] * ROWS // _heads_of_tile(problem)


def plan(inputs: AttentionInputs, config: Config) -> FwdLauncher:
    check_copied(inputs)
    gpu = current_gpu(inputs.q.device)
    assert gpu is not None
    extras = inputs.extras
    dtypes = [None if one is None else one.dtype for one in (extras.sinks, extras.alibi_slopes, extras.bias)]
    kind = PackedLauncher if _is_packed(inputs.problem) else FwdLauncher
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
        tiles = _tile_shapes(problem, config)
        self._templates = tuple(None if tile is None else template(tile, problem.dtype) for tile in tiles)
        self._early_start = early_start
        self._options = {"num_warps": 4, "maxnreg": _registers(config), "launch_pdl": early_start}
        self._builds: dict[_Variant, tuple[Build, tuple[Any, ...]]] = {}
        self._of_queries: Cache[Hashable, _OfQueries] = Cache(64)
        self._block_n, self._causal, self._mask = config["block_n"], problem.causal, problem.mask

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
            more = (argument(extras.sinks), argument(extras.alibi_slopes), argument(extras.bias))
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
        numbers = (*bias.strides, heads, heads // heads_kv, rows, keys, offset, *tail)
        return _bound(build.launch, grid, (encode_q, encode_k, encode_v, encode_out), numbers)

    def _prepare(
        self, key: Hashable, shapes: Shapes, of_q: tuple[int, ...], of_out: tuple[int, ...], bias_unit: int
    ) -> _OfQueries:
        sizes, shape_out = sizes_of(shapes, self._mask), (*shapes[0][:3], shapes[2][3])
        strides_q, strides_out = copied_strides("query", shapes[0], of_q), copied_strides("out", shape_out, of_out)
        grid, variant = _grid(sizes, self._config, self._gpu), _variant(sizes, self._config, self._gpu, bias_unit)
        build, constexprs = self._builds.get(variant) or self._build(variant)
        encode_q = encoders_of(build, self._templates, 0, shapes[0], strides_q)
        encode_out = encoders_of(build, self._templates, 3, shape_out, strides_out)
        tail = (*_schedule(sizes, self._config, grid[0]), *constexprs)
        made = self._of_queries[key] = _OfQueries(build, grid, encode_q, encode_out, tail)
        return made

    def _build(self, variant: _Variant) -> tuple[Build, tuple[Any, ...]]:
        constexprs = tuple(_constexprs(self._problem, self._config, variant, self._write_lse).values())
        lse = Pointer(torch.float32) if self._write_lse else None
        softcap = 0.5 if self._problem.modes.softcap else None
        sizes = [1] * len(SIZES)  # no build depends on them
        more = stand_ins(self._dtypes, variant.bias_unit)
        tiles = Pointer(torch.int32) if _is_packed(self._problem) else None
        arguments = (*self._templates, lse, 0.5, softcap, tiles, *more, *sizes, *constexprs)
        made = self._builds[variant] = Build(flashmoe_fwd_gluon_sm90, arguments, **self._options), constexprs
        return made


def _check_splits(num_splits: int) -> None:
    if num_splits > 1:
        raise CannotServe(f"num_splits is {num_splits}; this kernel never splits keys")


# (q, k, v, out, lse, the list of tiles, cu_seqlens_q, cu_seqlens_k, seqused_k, sinks, slopes, softmax_scale, softcap), all
# tensors by their addresses
_PackedLaunch = Callable[..., None]


class PackedLauncher(FwdLauncher):
    """The same for packed sequences, whose tiles another kernel lists first: ``bind_inputs`` and ``bind_cache`` alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lists: dict[bool, Callable[..., None]] = {}
        self._capped = bool(self._problem.modes.softcap)

    def bind_inputs(self, inputs: AttentionInputs, num_splits: int = 0) -> Callable[[AttentionInputs], AttentionOutput]:
        _check_splits(num_splits)
        launch, listed = self._bind_packed(inputs)
        results = results_of(inputs, listed)

        def bound(inputs: AttentionInputs) -> AttentionOutput:
            x = inputs.extras
            out, lse, tiles = results(inputs.out)
            tensors = (x.cu_seqlens_q, x.cu_seqlens_k, x.cache_seqlens, x.sinks, x.alibi_slopes)
            given = (inputs.q, inputs.k, inputs.v, out, lse, tiles, *tensors)
            launch(*[argument(one) for one in given], inputs.softmax_scale, x.softcap if self._capped else None)
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
            q, k, v, cu_q, cu_k, used, _, _, _, sinks, slopes = [argument(one) for one in tensors[:11]]
            if (q | k | v) & 15:
                return None
            out, lse, tiles = results(None)
            of_call = (argument(out), argument(lse), argument(tiles), cu_q, cu_k, used, sinks, slopes)
            launch(q, k, v, *of_call, scale if softmax_scale is None else softmax_scale, softcap)
            return out, lse

        return run

    def _bind_packed(self, inputs: AttentionInputs) -> tuple[_PackedLaunch, int]:
        """The launch of tensors of such shapes and strides, and how many numbers the list of tiles is."""
        q, k, v, extras = inputs.q, inputs.k, inputs.v, inputs.extras
        assert extras.cu_seqlens_q is not None
        batch, (_, heads, total, _), (_, heads_kv, keys, _) = extras.cu_seqlens_q.shape[0] - 1, q.shape, k.shape
        rows = _queries_of_tile(self._problem, self._config)
        listed = most_tiles(total, batch, rows)
        grid = _packed_grid(listed * heads // _heads_of_tile(self._problem), self._config, self._gpu)
        build, constexprs = self._builds.get(_PACKED) or self._build(_PACKED)
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
        tail = (*bias_of(extras).strides, heads, heads // heads_kv, total, keys, 0, 0, batch * heads, 0, *constexprs)
        start, list_tiles, list_grid = build.launch, self._list(extras.cache_seqlens is not None, rows), (batch, 1, 1)

        def launch(
            q: Any, k: Any, v: Any, out: Any, lse: Any, tiles: Any, cu_q: Any, cu_k: Any, used: Any, sinks: Any, slopes: Any,
            scale: float, softcap: float | None,
        ) -> None:  # fmt: skip
            list_tiles(list_grid, tiles, cu_q, cu_k, used, batch, listed)
            descriptors = described(encoders, (q, k, v, out))
            start(grid, *descriptors, lse, scale, softcap, tiles, sinks, slopes, None, *tail)

        return launch, numbers(listed)

    def _list(self, seqused: bool, rows: int) -> Callable[..., None]:
        made = self._lists.get(seqused)
        if made is None:
            made = self._lists[seqused] = list_of_tiles(rows, seqused, self._early_start)
        return made


def _schedule(sizes: Sizes, config: Config, programs: int) -> tuple[int, int, int]:
    """The kernel's last three integers: tiles_m, heads_all and pair_rounds."""
    return _tiles_m(sizes, config), sizes.batch * sizes.heads, _pair_rounds(sizes, config, programs)


def _bound(launch: Callable[..., None], grid: Grid, encoders: tuple[Parts, ...], tail: tuple[Any, ...]) -> Callable[..., None]:
    (encode_q, rest_q), (encode_k, rest_k), (encode_v, _), (encode_out, rest_out) = encoders
    no_rest = (None, None, None, None)
    whole = rest_q is None and rest_out is None

    def bound(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float,
        softcap: float | None = None, sinks: Any = None, slopes: Any = None, bias: Any = None,
    ) -> None:  # fmt: skip
        rest = no_rest if whole else (*_rest(rest_q, q), *_rest(rest_k, k), None, *_rest(rest_out, out))
        lse_address = None if lse is None else lse.data_ptr()
        values = (lse_address, scale, softcap, None, sinks, slopes, bias)
        launch(grid, *encode_q(q), *encode_k(k), *encode_v(v), *encode_out(out), *rest, *values, *tail)

    return bound


def _rest(encode: Encoder | None, tensor: torch.Tensor) -> tuple[Any, ...]:
    return (None,) if encode is None else encode(tensor)


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    return plan(inputs, config).bind_inputs(inputs)(inputs)


def _packed_grid(tiles: int, config: Config, gpu: Gpu) -> Grid:
    return min(tiles, gpu.sm_count * config["occupancy"]), 1, 1


def _listed(problem: AttentionProblem, config: Config) -> int:
    """The most tiles of packed sequences that are listed, as the problem's text has them."""
    lengths = sequence_lengths(problem.modes, problem.batch, problem.seqlen_q, problem.seqlen_k)
    return most_tiles(sum(one.queries for one in lengths), problem.batch, _queries_of_tile(problem, config))


def workspace(problem: AttentionProblem, config: Config) -> int:
    """Bytes of the list of tiles of packed sequences."""
    return 4 * numbers(_listed(problem, config)) if _is_packed(problem) else 0


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    name = f"^{flashmoe_fwd_gluon_sm90.__name__}$"
    if not _is_packed(problem):
        return (Launch(name, _grid(problem, config, gpu), _threads(config)),)
    tiles = _listed(problem, config) * problem.heads // _heads_of_tile(problem)
    main = Launch(name, _packed_grid(tiles, config, gpu), _threads(config))
    return Launch(f"^{flashmoe_packed_tiles_triton.__name__}$", (problem.batch, 1, 1), 32 * WARPS), main


def compile_job(problem: AttentionProblem, config: Config, gpu: Gpu) -> CompileJob:
    modes = problem.modes
    unit = AT_ONCE.value if modes.bias == "additive" else PAIR
    variant = _PACKED if _is_packed(problem) else _variant(problem, config, gpu, unit)
    constexprs = _constexprs(problem, config, variant, write_lse=True)
    signature = dict.fromkeys(flashmoe_fwd_gluon_sm90.arg_names, "i32")
    types = descriptor_types("qkvo", _tile_shapes(problem, config), problem.dtype)
    signature |= {name: one for name, one in types.items() if one is not None}
    constexprs |= {name: None for name, one in types.items() if one is None}
    more = {"softcap": "fp32" if modes.softcap else None, "sinks": "*fp32" if modes.sinks else None}
    more |= {"slopes": "*fp32" if modes.bias == "alibi" else None, "stride_slopes": "i64" if modes.bias == "alibi" else None}
    more["tiles"] = "*i32" if _is_packed(problem) else None
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
        threads=_threads(config),
        maxnreg=_registers(config),
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
