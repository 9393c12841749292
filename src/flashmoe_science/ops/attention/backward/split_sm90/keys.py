"""dK and dV of a tile of keys, and dS of it and every query that sees it, which goes to a workspace: the first kernel."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flashmoe_science.ops.attention.backward.split_sm90.one_tile import consume_dk, consume_dv
from flashmoe_science.ops.attention.backward.split_sm90.two_tiles import consume_tile
from flashmoe_science.ops.attention.backward.split_sm90.work import (
    SLOTS,
    Barriers,
    Kept,
    Second,
    Stages,
    Tensors,
    Work,
    heads_of,
    tiles_of,
)
from flashmoe_science.ops.attention.device.band import (
    KEYS,
    QUERIES,
    Packed,
    Sequence,
    band_of_keys,
    number_of_sequence,
    origin_of,
    sequence_at,
)
from flashmoe_science.ops.attention.device.tiles import coordinates
from flashmoe_science.ops.gluon_bridge import tma_load
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, make_barriers

SIZES = (
    "heads_kv", "group", "seqlen_k", "tiles_m", "offset", "first_head", "first_step", "end_step", "first_tile", "tiles_n",
    "band", "begin", "batches", "total_q", "total_k",
)  # fmt: skip


@gluon.jit
def _start_copies(descs, smem, barriers, place, numbers, state):
    """Start the copies of a step to a stage that is empty."""
    BLOCK_M: gl.constexpr = smem.q.shape[-2]
    stage = state.stage
    mbarrier.wait(barriers.queries.empty.index(stage), state.phase ^ 1)
    full = barriers.queries.full.index(stage)
    if barriers.douts is None:
        of_dout = full
        mbarrier.expect(full, descs.q.block_type.nbytes + descs.dout.block_type.nbytes + 8 * BLOCK_M)
    else:
        of_dout = barriers.douts.full.index(stage)
        mbarrier.expect(full, descs.q.block_type.nbytes + 4 * BLOCK_M)
    tma_load(descs.q, place, full, smem.q.index(stage))
    tma_load(descs.lse, numbers, full, smem.lse.index(stage))
    if barriers.douts is not None:
        mbarrier.wait(barriers.douts.empty.index(stage), state.phase ^ 1)
        mbarrier.expect(of_dout, descs.dout.block_type.nbytes + 4 * BLOCK_M)
    tma_load(descs.dout, place, of_dout, smem.dout.index(stage))
    tma_load(descs.delta, numbers, of_dout, smem.delta.index(stage))


@gluon.jit
def _load(descs, smem, barriers, work):
    """The producer: Q, dO and the numbers of their rows, a tile of queries a stage."""
    STAGES: gl.constexpr = smem.q.shape[0]
    BLOCK_M: gl.constexpr = smem.q.shape[-2]
    state = first_stage()
    first, end = heads_of(work)
    for one in range(first, end):
        low, _, _, high = tiles_of(work, one)
        head = work.head * work.group + one
        numbers = (work.head_all * work.group + one) * (work.tiles_m * BLOCK_M)
        if work.band is None:
            origin = origin_of(None, work.batch, head)
        else:
            origin = origin_of(work.sequence.queries, work.batch, head)
            if work.sequence.first_row is not None:
                numbers += work.sequence.first_row
        for tile in range(low, high):
            row = tile * BLOCK_M
            _start_copies(descs, smem, barriers, coordinates(origin, row, 0), [numbers + row], state)
            state = advance(state, STAGES)


@gluon.jit(do_not_specialize=SIZES)
def flashmoe_bwd_dkdv_gluon_sm90(
    q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, ds_desc, dk_desc, dv_desc, dk_kept, dv_kept,
    cu_seqlens_q, cu_seqlens_k, seqused_k, softmax_scale, softcap,
    heads_kv, group, seqlen_k, tiles_m, offset, first_head, first_step, end_step, first_tile, tiles_n,
    band, begin, batches, total_q, total_k,
    TILES: gl.constexpr, STAGES: gl.constexpr, MASKS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr, SECOND_QK: gl.constexpr, SECOND_V: gl.constexpr,
):  # fmt: skip
    """The grid: heads of a set, tiles of keys, sets of heads of keys. The wave has ``tiles_n`` tiles of keys from
    ``first_tile`` on; those that no query of the wave sees are left out. Without MASKS every query sees every key."""
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[-2]
    BLOCK_N: gl.constexpr = TILES * KEYS
    head_of_wave, tile = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0), gl.program_id(1)
    head_all, first_key = first_head + head_of_wave, (first_tile + tile) * BLOCK_N
    if band is None:
        low = gl.minimum(gl.maximum(first_key - offset, 0) // QUERIES * (QUERIES // BLOCK_M), tiles_m)
        whole = (gl.maximum(first_key + BLOCK_N - 1 - offset, 0) + BLOCK_M - 1) // BLOCK_M
        whole = gl.where(first_key + BLOCK_N > seqlen_k, tiles_m, whole)
        place = head_of_wave * tiles_n + tile
        work = Work(
            head_all // heads_kv, head_all % heads_kv, head_all, group, first_key, seqlen_k, offset, tiles_m, first_step,
            end_step, low, whole, place * (end_step - first_step) * BLOCK_N,
        )  # fmt: skip
        of_keys = None
    else:
        sequence = Sequence(tiles_m // (QUERIES // BLOCK_M), seqlen_k, offset)
        if cu_seqlens_q is not None:
            packed = Packed(cu_seqlens_q, cu_seqlens_k, seqused_k, batches, total_q, total_k)
            number = number_of_sequence(cu_seqlens_k, batches, first_tile + tile, BLOCK_N)
            sequence = sequence_at(packed, number, offset, BLOCK_N)
            first_key -= sequence.first_tile * BLOCK_N
            if begin is not None:
                begin += sequence.diagonal
        place = head_of_wave * tiles_n + tile
        work = Work(
            head_all // heads_kv, head_all % heads_kv, head_all, group, first_key, seqlen_k, offset, tiles_m, first_step,
            end_step, None, None, place * (end_step - first_step) * band * BLOCK_N,
            band, begin, sequence, band_of_keys(sequence, begin, first_key, BLOCK_M, BLOCK_N, QUERIES),
        )  # fmt: skip
        of_keys = sequence.keys

    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    dout_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + dout_desc.block_type.shape, dout_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    k_smem = gl.allocate_shared_memory(q_desc.dtype, [TILES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(q_desc.dtype, [TILES] + v_desc.block_type.shape, v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], q_desc.dtype)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [TILES * SLOTS, KEYS, BLOCK_M], ds_layout)
    queries, douts, of_p, p_smem = Stages(*make_barriers(STAGES, 2)), None, None, None
    if TILES == 1:
        douts, of_p = Stages(*make_barriers(STAGES, 2)), Stages(*make_barriers(1, 1))
        p_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_M // 2, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    keys = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys, count=1)
    fence_async_shared()
    mbarrier.expect(keys, (k_desc.block_type.nbytes + v_desc.block_type.nbytes) * TILES)
    origin = origin_of(of_keys, work.batch, work.head)
    for part in gl.static_range(TILES):
        tma_load(k_desc, coordinates(origin, first_key + part * KEYS, 0), keys, k_smem.index(part))
        tma_load(v_desc, coordinates(origin, first_key + part * KEYS, 0), keys, v_smem.index(part))

    smem = Tensors(q_smem, dout_smem, lse_smem, delta_smem, k_smem, v_smem, ds_smem, p_smem)
    sources = Tensors(q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc, ds_desc)
    results = Tensors(q_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc, ds_desc)
    barriers = Barriers(queries, keys, douts, of_p)
    kept = Kept(dk_kept, dv_kept, place * BLOCK_N)
    # With P in registers two products of few columns take longer than one of 128 (docs/notes/fwd-gluon-sm90.md).
    WHOLE_DV: gl.constexpr = v_smem.shape[-1] <= 128
    SECOND: gl.constexpr = Second(SECOND_QK, SECOND_V, 0 if WHOLE_DV else SECOND_V)
    if TILES == 1:
        gl.warp_specialize(
            [
                (consume_dv, (results, smem, barriers, work, kept, softmax_scale, softcap, SECOND, MASKS)),
                (consume_dk, (results, smem, barriers, work, kept, softmax_scale, SECOND)),
                (_load, (sources, smem, barriers, work)),
            ],
            [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume_tile, (results, smem, barriers, work, kept, softmax_scale, softcap, 0, SECOND, MASKS)),
                (consume_tile, (results, smem, barriers, work, kept, softmax_scale, softcap, 1, SECOND, MASKS)),
                (_load, (sources, smem, barriers, work)),
            ],
            [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
        )  # fmt: skip
