"""Attention forward in fp32 for Hopper in Gluon: each number as the sum of three of bf16, on the tensor cores.

Shapes: Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv] -> O [B, H, Sq, Dv], LSE [B, H, Sq], all fp32; D and Dv up
to 256, tensors of any strides and alignment. Compute capability 9.0 only.

The tensor cores take no fp32, and their TF32 keeps 11 bits. Three numbers of bf16 keep 24: the number rounded, what that leaves
rounded, and the rest. Of the nine products of two such sums the six largest are computed, the small ones first; what is left
out is below 2^-26 (Henry, Tang & Heinecke 2019, section 3).

A first kernel (planes.py) writes the three parts of Q, K and V, the planes, to device memory, so that TMA copies them as
operands of the products: split where they are used, K and V would be split again by every tile of queries. The second is a
forward with one producer warp and two consumers of 64 rows, one where heads are widest: six products take long enough that the
softmax of one consumer hides behind those of the other, without a pipeline within either. Only P is split in registers.

The tensor cores cut what they add to an accumulator off, toward zero: over thousands of products that is more than fp32 loses.
Each tile's P V is therefore a sum of its own, added to O by the fp32 units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, our_kernel, run_planned
from flashmoe_science.ops.attention.device import sm90
from flashmoe_science.ops.attention.device.kv_pipeline import Buffers
from flashmoe_science.ops.attention.device.mask import MaskBounds, mask_keys
from flashmoe_science.ops.attention.device.output import no_output, scale_rows, store_rows
from flashmoe_science.ops.attention.device.sm90 import threads
from flashmoe_science.ops.attention.device.softmax import (
    add_to_sums,
    as_column,
    log_sum_exp,
    normalizer,
    own_sums,
    softmax_step,
)
from flashmoe_science.ops.attention.device.tiles import (
    Origin,
    accumulator_layout,
    add_scores,
    allocate_tiles,
    as_matrix,
    load_tile,
    no_scores,
    parts_of,
)
from flashmoe_science.ops.attention.forward.fp32_sm90.config import (
    PLANES,
    SIZES,
    configs,
    grid_of,
    plane_blocks,
    suits,
    supports,
    workspace,
)
from flashmoe_science.ops.attention.forward.fp32_sm90.launch import Fp32Launcher
from flashmoe_science.ops.attention.forward.fp32_sm90.planes import flashmoe_fp32_planes
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.pipeline_gluon import advance, first_stage, make_barriers

NAME = "fp32_gluon_sm90"
ROWS = gl.constexpr(sm90.ROWS)


class Barriers(NamedTuple):
    """Barriers of Q's planes, and of full and empty stages of the one pipeline of K's and V's, [stages, 1]."""

    q_full: Any
    full: Any
    empty: Any


class Place(NamedTuple):
    """A program's head, its key head, both among those of all sequences, its first row, and how many tiles of keys it takes."""

    head: Any
    head_kv: Any
    top_row: Any
    tiles_n: Any


class Output(NamedTuple):
    """Where results go, and the scale of the softmax."""

    out: Any  # of the program's head
    lse: Any  # or None
    stride_om: Any
    scale_log2: Any


@gluon.jit
def _load_planes(descs, head, row, barriers, smem, state):
    """Start the copies of a tile's planes to the next stages, each once it is empty. Returns the PipelineState after them."""
    for plane in gl.static_range(PLANES):
        mbarrier.wait(barriers.empty.index(state.stage), state.phase ^ 1)
        load_tile(descs, Origin((plane, head)), row, barriers.full.index(state.stage), smem, state.stage)
        state = advance(state, barriers.full.shape[0])
    return state


@gluon.jit
def _produce(q_descs, k_descs, v_descs, buffers, barriers, place, CONSUMERS: gl.constexpr):
    """The producer: one warp that issues every copy from device memory."""
    for plane in gl.static_range(CONSUMERS * PLANES):
        row = place.top_row + plane // PLANES * ROWS
        origin = Origin((plane % PLANES, place.head))
        load_tile(q_descs, origin, row, barriers.q_full.index(plane), buffers.q, plane)
    state = first_stage()
    for i in range(place.tiles_n):
        row = (place.tiles_n - 1 - i) * buffers.k[0].shape[-2]
        state = _load_planes(k_descs, place.head_kv, row, barriers, buffers.k, state)
        state = _load_planes(v_descs, place.head_kv, row, barriers, buffers.v, state)


@gluon.jit
def _next_planes(barriers, state):
    """The next three stages, once they are full, and the PipelineState after them."""
    second = advance(state, barriers.full.shape[0])
    third = advance(second, barriers.full.shape[0])
    after = advance(third, barriers.full.shape[0])
    mbarrier.wait(barriers.full.index(state.stage), state.phase)
    mbarrier.wait(barriers.full.index(second.stage), second.phase)
    mbarrier.wait(barriers.full.index(third.stage), third.phase)
    return (state.stage, second.stage, third.stage), after


@gluon.jit
def _release(barriers, stages):
    for n in gl.static_range(PLANES):
        mbarrier.arrive(barriers.empty.index(stages[n]))


@gluon.jit
def _scores(buffers, FIRST: gl.constexpr, stages):
    """S = Q K^T of a tile of keys, [BLOCK_M, BLOCK_N], for the queries whose first plane is in stage ``FIRST``."""
    q, k = buffers.q, buffers.k
    s = add_scores(no_scores(q, k), q, FIRST, k, stages[2], True)
    s = add_scores(s, q, FIRST + 2, k, stages[0], False)
    s = add_scores(s, q, FIRST + 1, k, stages[1], False)
    s = add_scores(s, q, FIRST, k, stages[1], False)
    s = add_scores(s, q, FIRST + 1, k, stages[0], False)
    s = add_scores(s, q, FIRST, k, stages[0], False)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def _planes_of(p32, WIDTH: gl.constexpr):
    """The planes of P, [BLOCK_M, BLOCK_N] each, as operands of a product with WIDTH columns of V."""
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(WIDTH), 2)
    first = p32.to(gl.bfloat16)
    rest = p32 - first.to(gl.float32)
    second = rest.to(gl.bfloat16)
    third = (rest - second.to(gl.float32)).to(gl.bfloat16)
    return gl.convert_layout(first, operand), gl.convert_layout(second, operand), gl.convert_layout(third, operand)


@gluon.jit
def _values(p, v_smem, stages):
    """P V of a tile of keys, [BLOCK_M, width], in one part of V."""
    WIDTH: gl.constexpr = v_smem.shape[-1]
    v = (as_matrix(v_smem, stages[0]), as_matrix(v_smem, stages[1]), as_matrix(v_smem, stages[2]))
    o = gl.zeros([ROWS, WIDTH], gl.float32, accumulator_layout(WIDTH))
    o = warpgroup_mma(p[2], v[0], o, use_acc=False, is_async=True)
    o = warpgroup_mma(p[0], v[2], o, is_async=True)
    o = warpgroup_mma(p[1], v[1], o, is_async=True)
    o = warpgroup_mma(p[1], v[0], o, is_async=True)
    o = warpgroup_mma(p[0], v[1], o, is_async=True)
    o = warpgroup_mma(p[0], v[0], o, is_async=True)
    return warpgroup_mma_wait(0, [o])


@gluon.jit
def _tiles_before(end, BLOCK_N: gl.constexpr):
    return (gl.maximum(end, 0) + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _consume(output, buffers, barriers, place, bounds, CONSUMER: gl.constexpr, CAUSAL: gl.constexpr, DV: gl.constexpr):
    """A consumer: 64 rows of the program's tile of queries."""
    BLOCK_N: gl.constexpr = buffers.k[0].shape[-2]
    FIRST: gl.constexpr = CONSUMER * PLANES
    s_layout: gl.constexpr = accumulator_layout(BLOCK_N)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    first_row = place.top_row + CONSUMER * ROWS
    state = first_stage()
    begin = gl.to_tensor(0)
    whole = bounds.seqlen_k  # a tile that ends after it has keys that not all rows see
    if CAUSAL:
        whole = gl.minimum(whole, first_row + bounds.diagonal + 1)
        # Skip tiles that only the later consumer needs.
        begin = gl.maximum(place.tiles_n - _tiles_before(first_row + ROWS + bounds.diagonal, BLOCK_N), 0)
        for skipped in range(2 * begin):
            stages, state = _next_planes(barriers, state)
            _release(barriers, stages)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, row_layout)  # [BLOCK_M]
    row_sum = own_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout))
    lost = gl.zeros_like(row_sum)
    o = no_output(buffers.v, ROWS)  # [BLOCK_M, width]
    for plane in gl.static_range(PLANES):
        mbarrier.wait(barriers.q_full.index(FIRST + plane), 0)
    for i in range(begin, place.tiles_n):
        first_key = (place.tiles_n - 1 - i) * BLOCK_N
        stages, state = _next_planes(barriers, state)
        s = _scores(buffers, FIRST, stages)  # [BLOCK_M, BLOCK_N]
        _release(barriers, stages)
        if first_key + BLOCK_N > whole:
            s = mask_keys(s, first_key, first_row, bounds, s.shape[0], CAUSAL)
        p32, row_max, rescale = softmax_step(s, row_max, output.scale_log2, True, False)
        row_sum, lost = add_to_sums(row_sum, lost, p32, rescale, True)
        p = _planes_of(p32, o[0].shape[1])
        stages, state = _next_planes(barriers, state)
        first = o[0] * as_column(rescale, o[0]) + _values(p, buffers.v[0], stages)
        if len(o) == 2:
            p = _planes_of(p32, o[1].shape[1])  # no data move
            o = (first, o[1] * as_column(rescale, o[1]) + _values(p, buffers.v[1], stages))
        else:
            o = (first,)
        _release(barriers, stages)

    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
    row_max, row_sum, scale = normalizer(row_max, row_sum, None)
    o = scale_rows(o, scale)
    row = first_row + gl.arange(0, ROWS, row_layout)  # [BLOCK_M]
    store_rows(output.out, row.to(gl.int64) * output.stride_om, row < bounds.seqlen_q, o, DV)
    if output.lse is not None:
        lse = log_sum_exp(row_max, row_sum)
        gl.store(output.lse + place.head.to(gl.int64) * bounds.seqlen_q + row, lse, mask=row < bounds.seqlen_q)


@gluon.jit
def _first_parts(smem, PARTS: gl.constexpr):
    if len(smem) == PARTS:
        return smem
    else:
        return (smem[0],)


@gluon.jit(do_not_specialize=SIZES)
def flashmoe_fp32_gluon_sm90(
    q_desc, k_desc, v_desc, q_rest, k_rest, v_rest, out_base, lse_base, softmax_scale, stride_ob, stride_oh, stride_om,
    heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m,
    DV: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EARLY_START: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    q_descs, k_descs, v_descs = parts_of(q_desc, q_rest), parts_of(k_desc, k_rest), parts_of(v_desc, v_rest)
    q_smem, smem = allocate_tiles(q_descs, CONSUMERS * PLANES), allocate_tiles(k_descs, STAGES)
    buffers = Buffers(q_smem, smem, _first_parts(smem, len(v_descs)))
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * PLANES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(CONSUMERS * PLANES):
        mbarrier.init(q_full.index(n), count=1)
    full, empty = make_barriers(STAGES, CONSUMERS)
    barriers = Barriers(q_full, full, empty)
    fence_async_shared()
    # Neighbouring programs share a head, whose K and V are then in L2. The last rows see the most keys: they start first.
    tile_m, head_all = gl.program_id(0) % tiles_m, gl.program_id(0) // tiles_m
    if CAUSAL:
        tile_m = tiles_m - 1 - tile_m
    batch, head = head_all // heads, head_all % heads
    top_row = tile_m * (CONSUMERS * ROWS)
    end = seqlen_k
    if CAUSAL:
        end = gl.minimum(end, gl.minimum(top_row + CONSUMERS * ROWS, seqlen_q) + causal_offset)
    place = Place(head_all, batch * (heads // group) + head // group, top_row, _tiles_before(end, BLOCK_N))
    bounds = MaskBounds(seqlen_q, seqlen_k, causal_offset)
    out_base += batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
    output = Output(out_base, lse_base, stride_om, softmax_scale * 1.4426950408889634)
    if EARLY_START:
        gdc_wait()  # the planes are whole and visible from here on
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (output, buffers, barriers, place, bounds, 0, CAUSAL, DV)),
                (_produce, (q_descs, k_descs, v_descs, buffers, barriers, place, CONSUMERS)),
            ],
            [1], [PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (output, buffers, barriers, place, bounds, 0, CAUSAL, DV)),
                (_consume, (output, buffers, barriers, place, bounds, 1, CAUSAL, DV)),
                (_produce, (q_descs, k_descs, v_descs, buffers, barriers, place, CONSUMERS)),
            ],
            [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
        )


def plan(inputs: AttentionInputs, config: Config) -> Fp32Launcher:
    return Fp32Launcher(flashmoe_fp32_gluon_sm90, inputs, config)


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    heads = problem.batch * problem.heads
    blocks = plane_blocks(heads * problem.seqlen_q, problem.batch * problem.heads_kv * problem.seqlen_k)
    grid = grid_of(heads, problem.seqlen_q, config)
    return (
        Launch(f"^{flashmoe_fp32_planes.__name__}$", (sum(blocks), 1, 1), 128),
        Launch(f"^{flashmoe_fp32_gluon_sm90.__name__}$", grid, threads(config)),
    )


KERNEL = our_kernel(
    name=NAME,
    about="warp-specialised Gluon for Hopper for fp32: numbers as sums of three of bf16",
    supports=supports,
    configs=configs,
    run=run_planned(plan),
    launches=launches,
    plan=plan,
    workspace=workspace,
    suits=suits,
)
