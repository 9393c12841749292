"""Attention forward for Hopper in Gluon: a TMA producer warp and one to three consumer warpgroups of 64 query rows each.

Shapes: Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv] -> O [B, H, Sq, Dv], LSE [B, H, Sq], or packed sequences
(problem/features.py); fp16 and bf16, D and Dv multiples of 8 up to 256. Compute capability 9.0 only.

Tiles are powers of two wide, so a head of Q, K or O is held in one or two parts (192 is 128 + 64), padded by TMA's zero fill;
the scores are summed over the parts. V is one tile where one part would do. Else it is chunks of 64 columns, O is a tuple of
slices, and O += P V is the one product of device/wide.py (the wide form, where ``v_low`` is not None).

The producer (producer.py) streams K and V tiles through pipelines of shared-memory stages. A consumer (consumer.py, step.py)
issues S = Q K^T of the next tile before O += P V of this one, so that its softmax runs while the tensor cores work; P stays in
registers. Programs are persistent: each takes several tiles of queries (schedule.py). With two buffers for Q the producer runs
on into the next tile while this one is computed.

Keys go from the last tile to the first. Only K tiles that intersect the diagonal or a window edge are masked; a window's right
edge is a diagonal further right.

Of packed sequences a kernel before this one lists the tiles (packed_schedule.py). The producer takes one after another by a
counter and publishes it to the consumers (ops/pipeline_gluon.py); query heads that share a key head share a tile, and TMA's
descriptors end where a sequence does (``descriptors.ragged``).

Warp specialisation and the overlap of softmax with the products: Shah et al. 2024 (FlashAttention-3, sections 3.1 and 3.2).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, Launcher, our_kernel, run_planned
from flashmoe_science.ops.attention.device.bias import Bias
from flashmoe_science.ops.attention.device.bias_args import STRIDES
from flashmoe_science.ops.attention.device.kv_pipeline import Barriers, Buffers, Descriptors
from flashmoe_science.ops.attention.device.sm90 import threads
from flashmoe_science.ops.attention.device.softcap import Scales, capped_scales
from flashmoe_science.ops.attention.device.tiles import allocate_tiles, parts_of
from flashmoe_science.ops.attention.device.tma import check_copied
from flashmoe_science.ops.attention.device.wide import descriptor_of
from flashmoe_science.ops.attention.forward.prefill_sm90.arguments import Output, Pages, Sizes, Traits, Work
from flashmoe_science.ops.attention.forward.prefill_sm90.config import configs, fitted, suits, supports
from flashmoe_science.ops.attention.forward.prefill_sm90.consumer import consume
from flashmoe_science.ops.attention.forward.prefill_sm90.launch import FittedLauncher, FwdLauncher, PackedLauncher
from flashmoe_science.ops.attention.forward.prefill_sm90.packed_schedule import WARPS, flashmoe_packed_tiles_triton
from flashmoe_science.ops.attention.forward.prefill_sm90.producer import produce
from flashmoe_science.ops.attention.forward.prefill_sm90.variant import (
    SIZES,
    grid_of,
    heads_of_tile,
    is_packed,
    max_listed,
    packed_grid,
    workspace,
)
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.launch import can_start_early
from flashmoe_science.ops.pipeline_gluon import make_barriers, make_mailbox

NAME = "fwd_gluon_sm90"
OF_PAGES = ("stride_table", "pitch_k", "pitch_v")


@gluon.jit(do_not_specialize=(*SIZES, *STRIDES, *OF_PAGES, "left"))
def flashmoe_fwd_gluon_sm90(
    q_desc, k_desc, v_desc, o_desc, q_rest, k_rest, v_rest, o_rest, lse_base, softmax_scale, softcap, tiles, prefix, left,
    table, stride_table, pitch_k, pitch_v, sinks, slopes, bias, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_m,
    heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES_Q: gl.constexpr, STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
    CAUSAL: gl.constexpr, ALIGNED: gl.constexpr, EVEN_K: gl.constexpr, WRITE_LSE: gl.constexpr, OWN_OUT: gl.constexpr,
    SCHEDULE: gl.constexpr, UNIT: gl.constexpr, PAGE: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    CHUNKS: gl.constexpr = 1 if o_rest is None else (o_desc.block_type.shape[-1] + o_rest.block_type.shape[-1] + 63) // 64
    SINKS: gl.constexpr = sinks is not None
    TRAITS: gl.constexpr = Traits(CONSUMERS, CAUSAL, ALIGNED, EVEN_K, WRITE_LSE, OWN_OUT, SCHEDULE, UNIT, PAGE, SINKS)
    descs = Descriptors(parts_of(q_desc, q_rest), parts_of(k_desc, k_rest), (v_desc,))
    o_descs = parts_of(o_desc, o_rest)
    q_smem = allocate_tiles(descs.q, STAGES_Q * CONSUMERS)
    k_smem = allocate_tiles(descs.k, STAGES_K, BLOCK_N)
    v_smem = allocate_tiles(descs.v, STAGES_V * CHUNKS, BLOCK_N)
    if OWN_OUT:
        o_smem = allocate_tiles(o_descs, CONSUMERS)
    else:  # Q's tile is dead once the last scores are computed
        o_smem = q_smem
    v_low = o_rest
    if o_rest is not None:
        v_low = descriptor_of(v_smem[0])
    q_full, q_empty = make_barriers(STAGES_Q * CONSUMERS, 1)
    k_full, k_empty = make_barriers(STAGES_K, CONSUMERS)
    v_full, v_empty = make_barriers(STAGES_V, CONSUMERS)
    mailbox = tiles
    if tiles is not None:
        mailbox = make_mailbox(6, CONSUMERS)
    fence_async_shared()
    gdc_wait()  # all above ran while the kernel before this one was finishing; its results are visible from here on

    scales = Scales(softmax_scale * 1.4426950408889634, softcap)
    if softcap is not None:
        scales = capped_scales(softmax_scale, softcap)
    buffers = Buffers(q_smem, k_smem, v_smem, o_smem)
    barriers = Barriers(q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = Sizes(heads, group, seqlen_q, seqlen_k, causal_offset, tiles_m, heads_all, pair_rounds)
    work = Work(sizes, tiles, mailbox, prefix, left, Pages(table, stride_table, pitch_k, pitch_v))
    of_bias = Bias(bias, slopes, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_m)
    output = Output(o_descs, lse_base, scales, v_low, sinks, of_bias)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(consume, (output, buffers, barriers, work, 0, TRAITS)), (produce, (descs, buffers, barriers, work, TRAITS))],
            [1], [PRODUCER_REGS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (output, buffers, barriers, work, 0, TRAITS)),
                (consume, (output, buffers, barriers, work, 1, TRAITS)),
                (produce, (descs, buffers, barriers, work, TRAITS)),
            ],
            [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (output, buffers, barriers, work, 0, TRAITS)),
                (consume, (output, buffers, barriers, work, 1, TRAITS)),
                (consume, (output, buffers, barriers, work, 2, TRAITS)),
                (produce, (descs, buffers, barriers, work, TRAITS)),
            ],
            [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )


def plan(inputs: AttentionInputs, config: Config) -> Launcher:
    check_copied(inputs)
    gpu = current_gpu(inputs.q.device)
    assert gpu is not None
    tensors = inputs.tensors
    dtypes = [None if one is None else one.dtype for one in (tensors.sinks, tensors.alibi_slopes, tensors.bias)]
    kind = PackedLauncher if is_packed(inputs.problem) else FwdLauncher if config["consumers"] else FittedLauncher
    early = can_start_early(inputs.q.device)
    return kind(flashmoe_fwd_gluon_sm90, inputs.problem, config, gpu, inputs.return_lse, early, dtypes)


def exact(problem: AttentionProblem, config: Config, gpu: Gpu) -> Config:
    return fitted(problem, problem, config, gpu)


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    name = f"^{flashmoe_fwd_gluon_sm90.__name__}$"
    if not is_packed(problem):
        config = exact(problem, config, gpu)
        return (Launch(name, grid_of(problem, config, gpu), threads(config)),)
    tiles = max_listed(problem, config) * problem.heads // heads_of_tile(problem)
    main = Launch(name, packed_grid(tiles, config, gpu), threads(config))
    return Launch(f"^{flashmoe_packed_tiles_triton.__name__}$", (problem.batch + 1, 1, 1), 32 * WARPS), main


KERNEL = our_kernel(
    name=NAME,
    about="warp-specialised Gluon for Hopper: a TMA producer and one to three consumer warpgroups",
    supports=supports,
    configs=configs,
    run=run_planned(plan),
    launches=launches,
    plan=plan,
    workspace=workspace,
    suits=suits,
    exact=exact,
)
