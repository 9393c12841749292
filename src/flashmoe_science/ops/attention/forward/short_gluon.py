"""Attention forward of few rows and few keys, in Gluon: one program a tile of 16 or 32 queries, all keys at once.

Shapes: Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv] -> O [B, H, Sq, Dv], LSE [B, H, Sq]; D and Dv multiples of 8 up to
128, padded to a power of two in shared memory; Sk to 512, as shared memory allows. fp16 and bf16; sm_80 and up.

Such problems are bound by latency: of memory, and of the barriers of a program. So all of Q, K and V is copied to shared memory
at once, K's copies to be waited for before V's. The keys are parted among the warps, which are the first dimension of both
products: warps reduce independently, and their outputs are scaled to one maximum and added up at the end, in the order of the
warps.

Splitting the keys: Dao et al. 2023 (Flash-Decoding), here over warps. Copies past registers: cp.async of PTX ISA 7.0.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_wait

from flashmoe_science.hardware.gpus import Gpu, why_no_triton
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import CannotServe, Config, Device, Launch
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionLaunch, Launcher, our_kernel, run_planned
from flashmoe_science.ops.attention.call.outputs import out_strides
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.device.launch import launch_by_address
from flashmoe_science.ops.attention.device.output_triton import lse_rows
from flashmoe_science.ops.attention.device.softmax_triton import log_sum_exp
from flashmoe_science.ops.attention.device.tma import check_copied, copied_strides, why_not_in_copies
from flashmoe_science.ops.attention.device.warps import copied_columns, copied_keys, sum_of_warps, swizzled
from flashmoe_science.ops.attention.problem import AttentionProblem, padded_head_dim
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.gluon_bridge import cp_async
from flashmoe_science.ops.launch import Build, Grid, Pointer, can_start_early, cdiv, next_power_of_2, stride_class

NAME = "short_gluon"
MAX_KEYS, MAX_WIDTH = 512, 128
MIN_KEYS = 64  # 16 of each warp, as its second product takes them
WARPS = 4
LOW, TALL = 16, 32  # rows of a program
MAX_PROGRAMS = 65535  # in the second and third dimension of a grid
AT_ONCE = 2  # programs of a processor up to which they are the quickest
# Not specialised on: a new batch or length must not compile anew.
SIZES = ("seqlen_q", "seqlen_k", "causal_offset")


@gluon.jit
def _copy_keys(smem, base, stride, end, D: gl.constexpr, WHOLE: gl.constexpr):
    """Start copies of the rows of K or V from ``base`` on, [warps, keys of a warp, width]; zeros from row ``end`` on, and past
    the head's own ``D`` columns."""
    WARPS: gl.constexpr = smem.shape[0]
    KEYS: gl.constexpr = smem.shape[1]
    WIDTH: gl.constexpr = smem.shape[2]
    row = gl.expand_dims(copied_keys(WARPS, KEYS, WIDTH), 2)  # [WARPS, KEYS, 1]
    column = copied_columns(WARPS, WIDTH)  # [1, 1, WIDTH]
    if WHOLE:
        cp_async(smem, base + row * stride + column)
    else:
        cp_async(smem, base + row * stride + column, mask=(row < end) & (column < D))
    async_copy.commit_group()


@gluon.jit(do_not_specialize=SIZES)
def flashmoe_short_gluon(
    q_base, k_base, v_base, out_base, lse_base, softmax_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    seqlen_q, seqlen_k, causal_offset,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BLOCK_M: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr, EVEN_K: gl.constexpr, WRITE_LSE: gl.constexpr,
    EARLY_START: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Attend a tile of queries of a head to all keys that they see."""
    # Rows begin at 16 bytes: so that the compiler sees it.
    stride_qb, stride_qh, stride_qm = stride_qb // 8 * 8, stride_qh // 8 * 8, stride_qm // 8 * 8
    stride_kb, stride_kh, stride_kn = stride_kb // 8 * 8, stride_kh // 8 * 8, stride_kn // 8 * 8
    stride_vb, stride_vh, stride_vn = stride_vb // 8 * 8, stride_vh // 8 * 8, stride_vn // 8 * 8
    stride_ob, stride_oh, stride_om = stride_ob // 8 * 8, stride_oh // 8 * 8, stride_om // 8 * 8
    dtype: gl.constexpr = q_base.dtype.element_ty
    OWN: gl.constexpr = KEYS // WARPS  # keys of a warp
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], swizzled(BLOCK_D, [1, 0]))
    k_smem = gl.allocate_shared_memory(dtype, [WARPS, OWN, BLOCK_D], swizzled(BLOCK_D, [2, 1, 0]))
    v_smem = gl.allocate_shared_memory(dtype, [WARPS, OWN, BLOCK_DV], swizzled(BLOCK_DV, [2, 1, 0]))

    # A grid of three dimensions, so that nothing is divided by a number that the compiler does not know.
    first_row = gl.program_id(0) * BLOCK_M
    head, batch = gl.program_id(1).to(gl.int64), gl.program_id(2).to(gl.int64)
    head_kv = (gl.program_id(1) // GROUP).to(gl.int64)
    ACROSS: gl.constexpr = BLOCK_D // 8
    of_q: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, of_q)), 1)  # [BLOCK_M, 1]
    column = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(0, of_q)), 0)  # [1, BLOCK_D]
    q_tile = q_base + batch * stride_qb + head * stride_qh + first_row.to(gl.int64) * stride_qm
    end = seqlen_k
    if CAUSAL:
        end = gl.minimum(end, first_row + BLOCK_M + causal_offset)
    if EARLY_START:
        gdc_wait()  # the kernel before this one has finished and its results are visible from here on
    q_inside = (first_row + row < seqlen_q) & (column < D)
    cp_async(q_smem, q_tile + row * stride_qm + column, mask=q_inside)
    WHOLE: gl.constexpr = EVEN_K and not CAUSAL
    _copy_keys(k_smem, k_base + batch * stride_kb + head_kv * stride_kh, stride_kn, end, D, WHOLE and D == BLOCK_D)
    _copy_keys(v_smem, v_base + batch * stride_vb + head_kv * stride_vh, stride_vn, end, DV, WHOLE and DV == BLOCK_DV)

    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    scale_log2 = softmax_scale * 1.4426950408889634
    async_copy.wait_group(1)
    q = gl.expand_dims(q_smem.load(gl.SliceLayout(0, left)), 0)
    q, same = gl.broadcast(q, gl.zeros([WARPS, BLOCK_M, BLOCK_D], dtype, left))  # [WARPS, BLOCK_M, BLOCK_D]
    s = gl.zeros([WARPS, BLOCK_M, OWN], gl.float32, mma)
    s = mma_v2(q, k_smem.permute((0, 2, 1)).load(right), s)  # [WARPS, BLOCK_M, OWN]
    if not WHOLE:
        of_warp = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, mma))), 1)
        of_row = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, mma))), 0)
        of_key = gl.expand_dims(gl.expand_dims(gl.arange(0, OWN, gl.SliceLayout(0, gl.SliceLayout(1, mma))), 0), 1)
        key = gl.expand_dims(of_warp, 2) * OWN + of_key  # [WARPS, 1, OWN]
        if CAUSAL:
            end = gl.minimum(seqlen_k, gl.expand_dims(first_row + of_row, 2) + causal_offset + 1)
        s = gl.where(key < end, s, float("-inf"))
    row_max = gl.max(s, 2) * scale_log2  # [WARPS, BLOCK_M]
    # A row that sees none of a warp's keys has a maximum of -inf; subtracting 0 instead keeps exp2(-inf) = 0 rather than NaN.
    p = gl.exp2(s * scale_log2 - gl.expand_dims(gl.where(row_max == float("-inf"), 0.0, row_max), 2))
    row_sum = gl.sum(p, 2)
    async_copy.wait_group(0)
    o = gl.zeros([WARPS, BLOCK_M, BLOCK_DV], gl.float32, mma)
    o = mma_v2(gl.convert_layout(p.to(dtype), left), v_smem.load(right), o)  # [WARPS, BLOCK_M, BLOCK_DV]

    row_max, row_sum, out = sum_of_warps(o, row_max, row_sum)  # [BLOCK_M], [BLOCK_M], [BLOCK_M, BLOCK_DV]
    # A row that sees no key has a sum of 0: its output is 0 and its log-sum-exp log(0) = -inf.
    of_out: gl.constexpr = out.type.layout
    inverse = gl.convert_layout(1.0 / gl.where(row_sum == 0.0, 1.0, row_sum), gl.SliceLayout(1, of_out))
    out = out * gl.expand_dims(inverse, 1)
    row = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(1, of_out)), 1)
    column = gl.expand_dims(gl.arange(0, BLOCK_DV, gl.SliceLayout(0, of_out)), 0)
    out_tile = out_base + batch * stride_ob + head * stride_oh + first_row.to(gl.int64) * stride_om
    gl.store(out_tile + row * stride_om + column, out.to(dtype), mask=(first_row + row < seqlen_q) & (column < DV))
    if WRITE_LSE:
        lse_row = first_row + gl.arange(0, BLOCK_M, row_sum.type.layout)
        lse = log_sum_exp(row_max, row_sum)
        rows_of_lse = lse_rows(batch, head, lse_row, gl.num_programs(1), seqlen_q, None)
        gl.store(lse_base + rows_of_lse, lse, mask=lse_row < seqlen_q)


def supports(problem: AttentionProblem, device: Device) -> str | None:
    if reason := unsupported(problem.features) or why_no_triton(device) or why_not_in_copies(problem):
        return reason
    width = max(problem.head_dim, problem.head_dim_v)
    if width > MAX_WIDTH:
        return f"serves heads of up to {MAX_WIDTH}, not {width}"
    assert device is not None
    most = _max_keys(problem, device)
    return None if problem.seqlen_k <= most else f"serves up to {most} keys of such heads, not {problem.seqlen_k}"


def suits(problem: AttentionProblem, gpu: Gpu) -> bool:
    """While all programs run at once, and no more than two of a processor."""
    fitting = gpu.shared_per_sm // (_shared_bytes(problem, _keys(problem.seqlen_k), LOW) + 1024)
    return prod(_grid(problem, LOW)) <= gpu.sm_count * min(AT_ONCE, fitting)


def configs(problem: AttentionProblem, device: Device) -> tuple[Config, ...]:
    """Rows of a program, the best guess first; TALL where their scores and outputs fit the registers and shared memory."""
    assert device is not None
    keys, width = _keys(problem.seqlen_k), max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    if width > 64 or keys > 256 or _shared_bytes(problem, keys, TALL) > device.shared_per_block:
        return (Config(block_m=LOW),)
    alone = prod(_grid(problem, LOW)) <= device.sm_count  # on a processor
    return tuple(Config(block_m=rows) for rows in ((LOW, TALL) if alone else (TALL, LOW)))


def _max_keys(problem: AttentionProblem, gpu: Gpu) -> int:
    most = MAX_KEYS
    while _shared_bytes(problem, most, LOW) > gpu.shared_per_block:
        most //= 2
    return most


def _keys(seqlen_k: int) -> int:
    return max(MIN_KEYS, next_power_of_2(seqlen_k))


def _shared_bytes(problem: AttentionProblem, keys: int, rows: int) -> int:
    """Shared memory of a program: tiles of Q, K and V, then in their place each warp's output, maxima and sums in fp32."""
    width, width_v = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    return max(2 * (rows * width + keys * (width + width_v)), 4 * WARPS * rows * (width_v + 2))


def _constexprs(problem: AttentionProblem, config: Config, keys: int, even: bool, lse: bool, early: bool) -> dict[str, Any]:
    return {
        "GROUP": problem.heads // problem.heads_kv,
        "D": problem.head_dim,
        "DV": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_M": config["block_m"],
        "KEYS": keys,
        "CAUSAL": problem.causal,
        "EVEN_K": even,
        "WRITE_LSE": lse,
        "EARLY_START": early,
        "WARPS": WARPS,
    }


def _grid(problem: AttentionProblem, rows: int) -> Grid:
    return (cdiv(problem.seqlen_q, rows), problem.heads, problem.batch)


class ShortLauncher(Launcher):
    """The kernel with a config; see Launcher."""

    def __init__(self, inputs: AttentionInputs, config: Config) -> None:
        check_copied(inputs)
        gpu = gpu_of(inputs.q)
        assert gpu is not None
        self._problem, self._config, self._write_lse = inputs.problem, config, inputs.return_lse
        self._max_keys, self._early = _max_keys(inputs.problem, gpu), can_start_early(inputs.q.device)
        lse = Pointer(torch.float32) if inputs.return_lse else None
        self._pointers = (*(Pointer(inputs.q.dtype) for _ in range(4)), lse)
        # By keys in shared memory, whether all of them are there, strides.
        self._builds: dict[tuple[int, bool, Hashable], tuple[Build, tuple[Any, ...]]] = {}

    def bind(self, tensors: Tensors, options: Options, out: torch.Tensor | None = None) -> AttentionLaunch:
        q, k, v = tensors[:3]
        (batch, heads, rows, _), keys = q.shape, k.shape[2]
        if keys > self._max_keys:
            raise CannotServe(f"there are {keys} keys; it serves up to {self._max_keys} of such heads")
        if max(batch, heads) > MAX_PROGRAMS:
            raise CannotServe(f"there are {batch} sequences and {heads} heads; it serves up to {MAX_PROGRAMS} of each")
        of_out = out_strides(tensors, out)
        named = (("query", q.shape, q.stride()), ("key", k.shape, k.stride()), ("value", v.shape, v.stride()))
        every = (*named, ("output", q.shape, of_out))
        strides = tuple(step for name, shape, of in every for step in copied_strides(name, shape, of)[:3])
        if max(strides[2::3]) * MAX_KEYS >= 2**31:
            raise CannotServe(f"rows are up to {max(strides[2::3])} elements apart; it serves up to {2**31 // MAX_KEYS - 1}")
        padded = _keys(keys)
        variant = (padded, keys == padded, stride_class(strides))
        numbers = (*strides, rows, keys, keys - rows if self._problem.mask == "causal" else 0)
        build, constexprs = self._builds.get(variant) or self._build(variant, numbers)
        grid = (cdiv(rows, self._config["block_m"]), heads, batch)
        return launch_by_address(build.bound(grid, *numbers, *constexprs), tensors, options, of_out)

    def _build(self, variant: tuple[int, bool, Hashable], numbers: tuple[int, ...]) -> tuple[Build, tuple[Any, ...]]:
        keys, even, _ = variant
        constexprs = tuple(_constexprs(self._problem, self._config, keys, even, self._write_lse, self._early).values())
        arguments = (*self._pointers, 0.5, *numbers, *constexprs)
        build = Build(flashmoe_short_gluon, arguments, num_warps=WARPS, launch_pdl=self._early)
        self._builds[variant] = build, constexprs
        return build, constexprs


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    return (Launch(f"^{flashmoe_short_gluon.__name__}$", _grid(problem, config["block_m"]), 32 * WARPS),)


KERNEL = our_kernel(
    name=NAME,
    about="few rows and keys: all keys at once, parted among the warps; sm_80 and up",
    supports=supports,
    configs=configs,
    run=run_planned(ShortLauncher),
    launches=launches,
    plan=ShortLauncher,
    suits=suits,
)
