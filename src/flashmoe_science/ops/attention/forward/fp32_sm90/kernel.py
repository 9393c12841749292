"""Attention forward in fp32 for Hopper in Gluon: each number as the sum of three of bf16, on the tensor cores.

Shapes: Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv] -> O [B, H, Sq, Dv], LSE [B, H, Sq], all fp32; D and Dv up
to 256, tensors of any strides and alignment. Compute capability 9.0 only.

The tensor cores take no fp32, and their TF32 keeps 11 bits. Three numbers of bf16 keep 24: the number rounded, what that leaves
rounded, and the rest. Of the nine products of two such sums the six largest are computed, the small ones first; what is left
out is below 2^-26 (Henry, Tang & Heinecke 2019, section 3).

A first kernel writes the three parts of Q, K and V, the planes, to device memory, so that the copy engine brings them as the
products want them: taken apart where they are used, K and V would be so by every tile of queries. The second is a forward with
one producer warp and two consumers of 64 rows, one where heads are widest: six products take so long that the softmax of one
consumer hides behind those of the other, without a pipeline within either. Only P is taken apart in registers.

The tensor cores cut what they add to an accumulator off, toward zero: over thousands of products that is more than fp32 loses.
Each tile's P V is therefore a sum of its own, added to O by the fp32 units.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import CompileJob, Config, Launch
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionKernel, AttentionOutput, run_planned
from flashmoe_science.ops.attention.device import sm90
from flashmoe_science.ops.attention.device.mask import mask_keys
from flashmoe_science.ops.attention.device.output import no_output, scale_rows, store_rows
from flashmoe_science.ops.attention.device.sm90 import registers, threads
from flashmoe_science.ops.attention.device.softmax import log2_of_sum, own_sums, softmax_step
from flashmoe_science.ops.attention.device.tiles import as_matrix, load_tile, memory_of, parts_of
from flashmoe_science.ops.attention.device.tma import descriptor_types
from flashmoe_science.ops.attention.forward.fp32_sm90.config import (
    PLANES,
    SIZES,
    configs,
    constexprs_of,
    grid_of,
    plane_blocks,
    suits,
    supports,
    tile_shapes,
    workspace,
)
from flashmoe_science.ops.attention.forward.fp32_sm90.launch import Fp32Launcher
from flashmoe_science.ops.attention.forward.fp32_sm90.planes import flashmoe_fp32_planes
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.pipeline_gluon import advance, first_stage

NAME = "fp32_gluon_sm90"
ROWS = gl.constexpr(sm90.ROWS)


@gluon.jit
def _load_planes(descs, head, row, empty, full, ring, stage, phase):
    """Start the copies of the planes of a tile to the next stages of the ring, each once it is free."""
    for plane in gl.static_range(PLANES):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        load_tile(descs, (plane, head), row, full.index(stage), ring, stage)
        stage, phase = advance(stage, phase, ring[0].shape[0])
    return stage, phase


@gluon.jit
def _produce(descs, memory, barriers, place, CONSUMERS: gl.constexpr):
    """The producer: one warp that issues every copy from device memory."""
    q_descs, k_descs, v_descs = descs
    q_smem, ring, v_ring = memory
    q_full, full, empty = barriers
    head, head_kv, top_row, tiles_n = place
    for slot in gl.static_range(CONSUMERS * PLANES):
        row = top_row + slot // PLANES * ROWS
        load_tile(q_descs, (slot % PLANES, head), row, q_full.index(slot), q_smem, slot)
    stage, phase = first_stage()
    for i in range(tiles_n):
        row = (tiles_n - 1 - i) * ring[0].shape[3]
        stage, phase = _load_planes(k_descs, head_kv, row, empty, full, ring, stage, phase)
        stage, phase = _load_planes(v_descs, head_kv, row, empty, full, v_ring, stage, phase)


@gluon.jit
def _next_planes(ring, full, stage, phase):
    """The next three stages of the ring, once they are full; then the stage and the phase after them."""
    second, phase_2 = advance(stage, phase, ring[0].shape[0])
    third, phase_3 = advance(second, phase_2, ring[0].shape[0])
    after, phase_after = advance(third, phase_3, ring[0].shape[0])
    mbarrier.wait(full.index(stage), phase)
    mbarrier.wait(full.index(second), phase_2)
    mbarrier.wait(full.index(third), phase_3)
    return (stage, second, third), after, phase_after


@gluon.jit
def _release(empty, stages):
    for n in gl.static_range(PLANES):
        mbarrier.arrive(empty.index(stages[n]))


@gluon.jit
def _add_scores(q_smem, slot, ring, stage, s, START: gl.constexpr):
    """Start S += Q K^T of a plane of each."""
    k = as_matrix(ring[0], stage).permute((1, 0))
    s = warpgroup_mma(as_matrix(q_smem[0], slot), k, s, use_acc=not START, is_async=True)
    if len(ring) == 2:
        s = warpgroup_mma(as_matrix(q_smem[1], slot), as_matrix(ring[1], stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _scores(q_smem, FIRST: gl.constexpr, ring, stages):
    """S = Q K^T of a tile of keys, for the queries whose first plane is in slot ``FIRST``."""
    BLOCK_N: gl.constexpr = ring[0].shape[3]
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    s = _add_scores(q_smem, FIRST, ring, stages[2], s, True)
    s = _add_scores(q_smem, FIRST + 2, ring, stages[0], s, False)
    s = _add_scores(q_smem, FIRST + 1, ring, stages[1], s, False)
    s = _add_scores(q_smem, FIRST, ring, stages[1], s, False)
    s = _add_scores(q_smem, FIRST + 1, ring, stages[0], s, False)
    s = _add_scores(q_smem, FIRST, ring, stages[0], s, False)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def _planes_of(p32, WIDTH: gl.constexpr):
    """The planes of P as the products that are so wide take them."""
    operand: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]), 2)
    first = p32.to(gl.bfloat16)
    rest = p32 - first.to(gl.float32)
    second = rest.to(gl.bfloat16)
    third = (rest - second.to(gl.float32)).to(gl.bfloat16)
    return gl.convert_layout(first, operand), gl.convert_layout(second, operand), gl.convert_layout(third, operand)


@gluon.jit
def _values(p, v_smem, stages):
    """P V of a tile of keys, in one part of V."""
    WIDTH: gl.constexpr = v_smem.shape[4]
    v = (as_matrix(v_smem, stages[0]), as_matrix(v_smem, stages[1]), as_matrix(v_smem, stages[2]))
    o = gl.zeros([ROWS, WIDTH], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]))
    o = warpgroup_mma(p[2], v[0], o, use_acc=False, is_async=True)
    o = warpgroup_mma(p[0], v[2], o, is_async=True)
    o = warpgroup_mma(p[1], v[1], o, is_async=True)
    o = warpgroup_mma(p[1], v[0], o, is_async=True)
    o = warpgroup_mma(p[0], v[1], o, is_async=True)
    o = warpgroup_mma(p[0], v[0], o, is_async=True)
    return warpgroup_mma_wait(0, [o])


@gluon.jit
def _as_rows_of(factor, o):
    return gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout)), 1)


@gluon.jit
def _tiles_before(end, BLOCK_N: gl.constexpr):
    return (gl.maximum(end, 0) + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _consume(output, memory, barriers, place, sizes, CONSUMER: gl.constexpr, CAUSAL: gl.constexpr, DV: gl.constexpr):
    """A consumer: 64 rows of the program's tile of queries."""
    out_base, lse_base, stride_om, scale_log2 = output
    q_smem, ring, v_ring = memory
    q_full, full, empty = barriers
    head, head_kv, top_row, tiles_n = place
    seqlen_q, seqlen_k, causal_offset = sizes
    BLOCK_N: gl.constexpr = ring[0].shape[3]
    FIRST: gl.constexpr = CONSUMER * PLANES
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    first_row = top_row + CONSUMER * ROWS
    stage, phase = first_stage()
    begin = gl.to_tensor(0)
    whole = seqlen_k  # a tile that ends after it has keys that not all rows see
    if CAUSAL:
        whole = gl.minimum(whole, first_row + causal_offset + 1)
        # Tiles that only the later consumer needs: let them pass.
        begin = gl.maximum(tiles_n - _tiles_before(first_row + ROWS + causal_offset, BLOCK_N), 0)
        for skipped in range(2 * begin):
            stages, stage, phase = _next_planes(ring, full, stage, phase)
            _release(empty, stages)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    row_sum = own_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout))
    lost = gl.zeros_like(row_sum)
    o = no_output(v_ring, ROWS)
    for plane in gl.static_range(PLANES):
        mbarrier.wait(q_full.index(FIRST + plane), 0)
    for i in range(begin, tiles_n):
        first_key = (tiles_n - 1 - i) * BLOCK_N
        stages, stage, phase = _next_planes(ring, full, stage, phase)
        s = _scores(q_smem, FIRST, ring, stages)
        _release(empty, stages)
        if first_key + BLOCK_N > whole:
            s = mask_keys(s, first_key, first_row, (seqlen_q, seqlen_k, causal_offset, None, None), s.shape[0], CAUSAL)
        p32, row_max, rescale = softmax_step(s, row_max, scale_log2, True, False)
        # A sum in which what rounding takes is kept (Kahan 1965).
        shrink = _as_rows_of(rescale, row_sum)
        before = row_sum * shrink
        more = gl.convert_layout(own_sums(p32), row_sum.type.layout) - lost * shrink
        row_sum = before + more
        lost = (row_sum - before) - more
        p = _planes_of(p32, o[0].shape[1])
        stages, stage, phase = _next_planes(ring, full, stage, phase)
        first = o[0] * _as_rows_of(rescale, o[0]) + _values(p, v_ring[0], stages)
        if len(o) == 2:
            p = _planes_of(p32, o[1].shape[1])  # no data move
            o = (first, o[1] * _as_rows_of(rescale, o[1]) + _values(p, v_ring[1], stages))
        else:
            o = (first,)
        _release(empty, stages)

    # A row that sees no key has a sum of 0: its output is 0 and its log-sum-exp log(0) = -inf.
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
    o = scale_rows(o, 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum))
    row = first_row + gl.arange(0, ROWS, row_layout)
    store_rows(out_base, row.to(gl.int64) * stride_om, row < seqlen_q, o, DV)
    if lse_base is not None:
        shift = gl.where(row_max == float("-inf"), 0.0, row_max)
        lse = (shift + log2_of_sum(row_sum)) * 0.6931471805599453
        gl.store(lse_base + head.to(gl.int64) * seqlen_q + row, lse, mask=row < seqlen_q)


@gluon.jit
def _first_parts(ring, PARTS: gl.constexpr):
    if len(ring) == PARTS:
        return ring
    else:
        return (ring[0],)


@gluon.jit(do_not_specialize=SIZES)
def flashmoe_fp32_gluon_sm90(
    q_desc, k_desc, v_desc, q_rest, k_rest, v_rest, out_base, lse_base, softmax_scale, stride_ob, stride_oh, stride_om,
    heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m,
    DV: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EARLY_START: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    descs = (parts_of(q_desc, q_rest), parts_of(k_desc, k_rest), parts_of(v_desc, v_rest))
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    q_smem, ring = memory_of(descs[0], CONSUMERS * PLANES), memory_of(descs[1], STAGES)
    memory = (q_smem, ring, _first_parts(ring, len(descs[2])))
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * PLANES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(CONSUMERS * PLANES):
        mbarrier.init(q_full.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=CONSUMERS)
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
    place = (head_all, batch * (heads // group) + head // group, top_row, _tiles_before(end, BLOCK_N))
    sizes = (seqlen_q, seqlen_k, causal_offset)
    barriers = (q_full, full, empty)
    out_base += batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
    output = (out_base, lse_base, stride_om, softmax_scale * 1.4426950408889634)
    if EARLY_START:
        gdc_wait()  # the planes are whole and visible from here on
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (output, memory, barriers, place, sizes, 0, CAUSAL, DV)),
                (_produce, (descs, memory, barriers, place, CONSUMERS)),
            ],
            [1],
            [PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (output, memory, barriers, place, sizes, 0, CAUSAL, DV)),
                (_consume, (output, memory, barriers, place, sizes, 1, CAUSAL, DV)),
                (_produce, (descs, memory, barriers, place, CONSUMERS)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )


def plan(inputs: AttentionInputs, config: Config) -> Fp32Launcher:
    return Fp32Launcher(flashmoe_fp32_gluon_sm90, inputs, config)


def run(inputs: AttentionInputs, config: Config) -> AttentionOutput:
    return run_planned(KERNEL, inputs, config)


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    heads = problem.batch * problem.heads
    blocks = plane_blocks(heads * problem.seqlen_q, problem.batch * problem.heads_kv * problem.seqlen_k)
    grid = grid_of(heads, problem.seqlen_q, config)
    return (
        Launch(f"^{flashmoe_fp32_planes.__name__}$", (sum(blocks), 1, 1), 128),
        Launch(f"^{flashmoe_fp32_gluon_sm90.__name__}$", grid, threads(config)),
    )


def compile_job(problem: AttentionProblem, config: Config, gpu: Gpu) -> CompileJob:
    """Of the main kernel; the other one is a few loads."""
    constexprs = constexprs_of(problem, config, early=True)
    signature = dict.fromkeys(flashmoe_fp32_gluon_sm90.arg_names, "i32")
    types = descriptor_types("qkv", tile_shapes(problem, config), "bf16")
    signature |= {name: one for name, one in types.items() if one is not None}
    constexprs |= {name: None for name, one in types.items() if one is None}
    signature |= {"out_base": "*fp32", "lse_base": "*fp32", "softmax_scale": "fp32"} | dict.fromkeys(constexprs, "constexpr")
    return CompileJob(
        function=flashmoe_fp32_gluon_sm90,
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=("out_base", "stride_ob", "stride_oh", "stride_om"),
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
    about="warp-specialised Gluon for Hopper for fp32: numbers as sums of three of bf16",
    supports=supports,
    configs=configs,
    run=run,
    launches=launches,
    plan=plan,
    workspace=workspace,
    compile_job=compile_job,
    suits=suits,
)
