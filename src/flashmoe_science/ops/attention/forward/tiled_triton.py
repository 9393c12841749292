"""Attention forward in portable Triton: one program a tile of queries, a loop over tiles of keys with an online softmax.

Shapes: Q [B, H, Sq, D], K [B, Hk, Sk, D], V [B, Hk, Sk, Dv] -> O [B, H, Sq, Dv], LSE [B, H, Sq]; D and Dv from 1 to 256,
padded to a power of two in registers only. fp16, bf16 and fp32 (as six bf16 products); sm_80 and up.
Where all keys fit one tile there is no loop at all, as short sequences are bound by latency; short_gluon.py is for those that
it serves.

Online softmax: Milakov and Gimelshein 2018; tiling and the log-sum-exp: Dao et al. 2022, Dao 2023 (FlashAttention 1 and 2).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from flashmoe_science.hardware.gpus import Gpu, why_no_hopper, why_no_triton
from flashmoe_science.kernel import CannotServe, Config, Device, Launch
from flashmoe_science.ops.attention.call.kernel import AttentionInputs, AttentionLaunch, Launcher, our_kernel, run_planned
from flashmoe_science.ops.attention.call.outputs import out_strides
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.device.launch import launch_by_address
from flashmoe_science.ops.attention.device.output_triton import lse_rows, normalized
from flashmoe_science.ops.attention.device.product_triton import product
from flashmoe_science.ops.attention.device.softmax_triton import PLAIN_SUM, log_sum_exp, softmax_step
from flashmoe_science.ops.attention.problem import AttentionProblem, length_class, padded_head_dim
from flashmoe_science.ops.attention.problem.features import unsupported
from flashmoe_science.ops.launch import (
    INTERPRETING,
    Build,
    Pointer,
    can_start_early,
    cdiv,
    next_power_of_2,
    stride_class,
    stride_unit,
)
from flashmoe_science.problem import DTYPE_BYTES

NAME = "fwd_triton"
# Not specialised on: a new batch or length must not compile anew.
SIZES = ("heads", "group", "seqlen_q", "seqlen_k", "causal_offset")


# What a tile of keys is specialised on: constexprs of the kernel.
_Traits = namedtuple("_Traits", "D DV BLOCK_D BLOCK_DV CAUSAL ONE_TILE SCALE_FIRST PRECISION COMPENSATED INTERPRET")


@triton.jit
def _attend_tile(
    q, k_tile, v_tile, stride_kn, stride_vn, row_max, row_sum, lost, acc, scale_log2, first_key, rows, keys,
    dims, dims_v, seqlen_k, causal_offset, MASKED: tl.constexpr, traits: tl.constexpr,
):  # fmt: skip
    """Attend ``q`` to one tile of keys. ``k_tile`` and ``v_tile`` point at its first row."""
    D: tl.constexpr = traits.D
    DV: tl.constexpr = traits.DV
    key = first_key + keys  # [BLOCK_N]
    k_ptrs = k_tile + keys[:, None] * stride_kn + dims[None, :]  # [BLOCK_N, BLOCK_D]
    v_ptrs = v_tile + keys[:, None] * stride_vn + dims_v[None, :]  # [BLOCK_N, BLOCK_DV]
    if MASKED:
        k = tl.load(k_ptrs, mask=(key[:, None] < seqlen_k) & (dims[None, :] < D), other=0.0)
        v = tl.load(v_ptrs, mask=(key[:, None] < seqlen_k) & (dims_v[None, :] < DV), other=0.0)
    else:
        if D == traits.BLOCK_D:
            k = tl.load(k_ptrs)
        else:
            k = tl.load(k_ptrs, mask=dims[None, :] < D, other=0.0)
        if DV == traits.BLOCK_DV:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=dims_v[None, :] < DV, other=0.0)
    s = product(q, tl.trans(k), None, traits.PRECISION, traits.INTERPRET)  # [BLOCK_M, BLOCK_N]
    if traits.SCALE_FIRST:
        s = s * scale_log2
    if MASKED:
        visible = key[None, :] < seqlen_k
        if traits.CAUSAL:
            visible = visible & (key[None, :] <= rows[:, None] + causal_offset)
        s = tl.where(visible, s, float("-inf"))
    scale_log2 = 1.0 if traits.SCALE_FIRST else scale_log2
    p, row_max, row_sum, lost, rescale = softmax_step(s, row_max, row_sum, lost, scale_log2, traits.COMPENSATED)
    if not traits.ONE_TILE:
        acc = acc * rescale[:, None]  # [BLOCK_M, BLOCK_DV]
    acc = product(p.to(v.dtype), v, acc, traits.PRECISION, traits.INTERPRET)
    return row_max, row_sum, lost, acc


@triton.jit(do_not_specialize=SIZES)
def flashmoe_fwd_triton(
    q_base, k_base, v_base, out_base, lse_base, softmax_scale,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    heads, group, seqlen_q, seqlen_k, causal_offset,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, ONE_TILE: tl.constexpr, EVEN_K: tl.constexpr, WRITE_LSE: tl.constexpr, COMPENSATED: tl.constexpr,
    SCALE_FIRST: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    EARLY_START: tl.constexpr,
):  # fmt: skip
    """Attend a tile of queries of a head to all keys that they see."""
    if UNIT > 1:  # see stride_unit
        stride_qb, stride_qh, stride_qm = stride_qb // UNIT * UNIT, stride_qh // UNIT * UNIT, stride_qm // UNIT * UNIT
        stride_kb, stride_kh, stride_kn = stride_kb // UNIT * UNIT, stride_kh // UNIT * UNIT, stride_kn // UNIT * UNIT
        stride_vb, stride_vh, stride_vn = stride_vb // UNIT * UNIT, stride_vh // UNIT * UNIT, stride_vn // UNIT * UNIT
        stride_ob, stride_oh, stride_om = stride_ob // UNIT * UNIT, stride_oh // UNIT * UNIT, stride_om // UNIT * UNIT
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    tile_m = pid % tiles_m
    if CAUSAL:  # the last rows see the most keys: start them first
        tile_m = tiles_m - 1 - tile_m
    batch = pid // tiles_m // heads
    head = pid // tiles_m % heads
    batch, head, head_kv = batch.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)

    first_row = tile_m * BLOCK_M
    local_rows, keys = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    dims, dims_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows = first_row + local_rows
    if WIDE:  # a tile of rows may span 2^31 elements
        stride_qm, stride_kn, stride_vn = stride_qm.to(tl.int64), stride_kn.to(tl.int64), stride_vn.to(tl.int64)
        stride_om = stride_om.to(tl.int64)
    q_tile = q_base + batch * stride_qb + head * stride_qh + first_row.to(tl.int64) * stride_qm
    k_tile = k_base + batch * stride_kb + head_kv * stride_kh
    v_tile = v_base + batch * stride_vb + head_kv * stride_vh
    if EARLY_START:
        gdc_wait()  # the kernel before this one has finished and its results are visible from here on
    q = tl.load(  # [BLOCK_M, BLOCK_D]
        q_tile + local_rows[:, None] * stride_qm + dims[None, :],
        mask=(rows[:, None] < seqlen_q) & (dims[None, :] < D),
        other=0.0,
    )
    scale_log2 = softmax_scale * 1.4426950408889634

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M], scaled to an exponent of base 2
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    lost = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    traits: tl.constexpr = _Traits(
        D, DV, BLOCK_D, BLOCK_DV, CAUSAL, ONE_TILE, SCALE_FIRST, PRECISION, COMPENSATED, INTERPRET
    )  # fmt: skip
    if ONE_TILE:
        row_max, row_sum, lost, acc = _attend_tile(
            q, k_tile, v_tile, stride_kn, stride_vn, row_max, row_sum, lost, acc, scale_log2,
            0, rows, keys, dims, dims_v, seqlen_k, causal_offset, CAUSAL or not EVEN_K, traits,
        )  # fmt: skip
    else:
        end = seqlen_k
        unmasked_end = seqlen_k // BLOCK_N * BLOCK_N
        if CAUSAL:
            end = tl.minimum(end, tl.maximum(first_row + BLOCK_M + causal_offset, 0))
            unmasked_end = tl.minimum(unmasked_end, tl.maximum(first_row + causal_offset + 1, 0) // BLOCK_N * BLOCK_N)
        for first_key in tl.range(0, unmasked_end, BLOCK_N, num_stages=NUM_STAGES):
            row_max, row_sum, lost, acc = _attend_tile(
                q, k_tile, v_tile, stride_kn, stride_vn, row_max, row_sum, lost, acc, scale_log2,
                first_key, rows, keys, dims, dims_v, seqlen_k, causal_offset, False, traits,
            )  # fmt: skip
            k_tile += BLOCK_N * stride_kn
            v_tile += BLOCK_N * stride_vn
        if CAUSAL or not EVEN_K:
            for first_key in tl.range(unmasked_end, end, BLOCK_N, num_stages=1):
                row_max, row_sum, lost, acc = _attend_tile(
                    q, k_tile, v_tile, stride_kn, stride_vn, row_max, row_sum, lost, acc, scale_log2,
                    first_key, rows, keys, dims, dims_v, seqlen_k, causal_offset, True, traits,
                )  # fmt: skip
                k_tile += BLOCK_N * stride_kn
                v_tile += BLOCK_N * stride_vn

    acc = normalized(acc, row_sum)  # [BLOCK_M, BLOCK_DV]
    out_tile = out_base + batch * stride_ob + head * stride_oh + first_row.to(tl.int64) * stride_om
    tl.store(
        out_tile + local_rows[:, None] * stride_om + dims_v[None, :],
        acc.to(out_base.dtype.element_ty),
        mask=(rows[:, None] < seqlen_q) & (dims_v[None, :] < DV),
    )
    if WRITE_LSE:
        lse = log_sum_exp(row_max, row_sum)
        tl.store(lse_base + lse_rows(batch, head, rows, heads, seqlen_q, None), lse, mask=rows < seqlen_q)


def supports(problem: AttentionProblem, device: Device) -> str | None:
    return unsupported(problem.features) or why_no_triton(device)


def suits(problem: AttentionProblem, gpu: Gpu) -> bool:
    """Wider heads spill, and the kernels for Hopper are up to twice as fast with them, however few the tiles."""
    width = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    return width <= 128 or problem.dtype == "fp32" or why_no_hopper(gpu) is not None


def configs(problem: AttentionProblem, device: Device) -> tuple[Config, ...]:
    """Tiles that fit the GPU's shared memory, the best guess first (docs/notes/fwd-triton-tiles.md)."""
    assert device is not None
    fitting = [tile for tile in _tiles(problem, device) if _shared_bytes(problem, tile) <= device.shared_per_block]
    names = ("block_m", "block_n", "num_warps", "num_stages")
    return tuple(Config(**dict(zip(names, tile, strict=True))) for tile in dict.fromkeys(fitting))


_Tile = tuple[int, int, int, int]  # block_m, block_n, num_warps, num_stages


def _tiles(problem: AttentionProblem, gpu: Gpu) -> list[_Tile]:
    width = max(padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v))
    wgmma = gpu.compute_capability[0] == 9
    if problem.dtype == "fp32":
        if width <= 64:
            return [(32, 64, 4, 2), (64, 16, 4, 2), (16, 16, 4, 2)]
        if width <= 128:
            return [*([(64, 32, 4, 1)] if wgmma else []), (32, 16, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1)]
        return [(16, 16, 4, 1)]
    keys = max(16, next_power_of_2(problem.seqlen_k))
    tiles: list[_Tile] = []
    if problem.batch * problem.heads * cdiv(problem.seqlen_q, 16) <= gpu.sm_count and width <= 128:
        # Few rows: latency decides. Thin tiles spread the rows over the GPU, wide ones take all keys in one step.
        few_keys = 2 if keys == 16 else 4
        widest = 256 if width <= 64 else 64
        tiles += [(16, min(keys, widest), few_keys, 3), (16, min(keys, widest // 2), few_keys, 3), (16, min(keys, 64), 2, 3)]
    if width <= 64:
        whole = [(128, 128, 8, 1), (64, 128, 4, 2)] if 64 < keys <= 128 else []
        if wgmma and problem.head_dim != width:  # the mask of a padded head takes registers, and 128 keys spill in 4 warps
            return [*tiles, (128, 64, 8, 3), (64, 64, 4, 3), *whole, (64, 64, 4, 2)]
        deep, shallow = (64, 64, 4, 3), (64, 64, 4, 2)
        if problem.causal and gpu.compute_capability[0] == 12:  # three stages spill there under a diagonal
            deep, shallow = shallow, deep
        return [*tiles, deep, *whole, (64, 128, 4, 3), (128, 64, 8, 3), shallow]
    if width <= 128:
        return [*tiles, *([(64, 64, 4, 3), (128, 64, 8, 3)] if wgmma else []), (64, 64, 8, 2), (64, 32, 4, 2)]
    # With a narrower value, 64 keys spill registers on Blackwell.
    narrower = padded_head_dim(problem.head_dim_v) != padded_head_dim(problem.head_dim)
    wide = wgmma or (gpu.compute_capability[0] > 9 and not narrower)
    return [*([(64, 64, 8, 2)] if wide else []), (64, 32, 8, 2), (32, 32, 4, 2), (16, 32, 4, 2)]


def _shared_bytes(problem: AttentionProblem, tile: _Tile) -> int:
    """Shared memory that such a tile takes, from above: Q's tile and the stages of K and V."""
    block_m, block_n, _, stages = tile
    width, width_v = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    buffers = 1 if problem.seqlen_k <= block_n else stages
    return DTYPE_BYTES[problem.dtype] * (block_m * max(width, width_v) + buffers * block_n * (width + width_v))


class _Variant(NamedTuple):
    """What a build is specialised on by the sizes of a call."""

    one_tile: bool
    even_k: bool
    wide: bool
    unit: int
    strides: Hashable


def _constexprs(
    problem: AttentionProblem, config: Config, variant: _Variant, write_lse: bool, scale_first: bool, early_start: bool
) -> dict[str, Any]:
    return {
        "D": problem.head_dim,
        "DV": problem.head_dim_v,
        "BLOCK_D": padded_head_dim(problem.head_dim),
        "BLOCK_DV": padded_head_dim(problem.head_dim_v),
        "BLOCK_M": config["block_m"],
        "BLOCK_N": config["block_n"],
        "NUM_STAGES": config["num_stages"],
        "CAUSAL": problem.causal,
        "ONE_TILE": variant.one_tile,
        "EVEN_K": variant.even_k,
        "WRITE_LSE": write_lse,
        "COMPENSATED": write_lse and length_class(problem.seqlen_k) > PLAIN_SUM,
        "SCALE_FIRST": scale_first,
        "WIDE": variant.wide,
        "UNIT": variant.unit,
        "PRECISION": "bf16x6" if problem.dtype == "fp32" else "tf32",
        "INTERPRET": INTERPRETING,
        "EARLY_START": early_start,
    }


def _grid(problem: AttentionProblem, config: Config) -> tuple[int, int, int]:
    return (cdiv(problem.seqlen_q, config["block_m"]) * problem.batch * problem.heads, 1, 1)


class TiledLauncher(Launcher):
    """The kernel with a config; see Launcher."""

    def __init__(self, inputs: AttentionInputs, config: Config) -> None:
        self._problem, self._config, self._write_lse = inputs.problem, config, inputs.return_lse
        self._scale_first = inputs.softmax_scale <= 0.0
        self._early = not INTERPRETING and can_start_early(inputs.q.device)
        dtype, lse = inputs.q.dtype, Pointer(torch.float32) if inputs.return_lse else None
        self._pointers = (*(Pointer(dtype, one.data_ptr()) for one in (inputs.q, inputs.k, inputs.v)), Pointer(dtype), lse)
        self._builds: dict[_Variant, tuple[Build, tuple[Any, ...]]] = {}

    def bind(self, tensors: Tensors, options: Options, out: torch.Tensor | None = None) -> AttentionLaunch:
        q, k, v = tensors[:3]
        (batch, heads, rows, _), (_, heads_kv, keys, _), of_out = q.shape, k.shape, out_strides(tensors, out)
        block_m, block_n = self._config["block_m"], self._config["block_n"]
        programs = cdiv(rows, block_m) * batch * heads
        if programs >= 2**31:
            raise CannotServe(f"it takes {programs} programs; a launch may have {2**31 - 1}")
        (qb, qh, qm, _), (kb, kh, kn, _), (vb, vh, vn, _), (ob, oh, om, _) = q.stride(), k.stride(), v.stride(), of_out
        strides = (qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om)
        wide = max(qm, kn, vn, om) * max(block_m, block_n) >= 2**31
        variant = _Variant(keys <= block_n, keys % block_n == 0, wide, stride_unit(strides), stride_class(strides))
        numbers = (*strides, heads, heads // heads_kv, rows, keys, keys - rows if self._problem.mask == "causal" else 0)
        build, constexprs = self._builds.get(variant) or self._build(variant, numbers)
        return launch_by_address(build.bound((programs, 1, 1), *numbers, *constexprs), tensors, options, of_out)

    def _build(self, variant: _Variant, numbers: tuple[int, ...]) -> tuple[Build, tuple[Any, ...]]:
        config = self._config
        values = _constexprs(self._problem, config, variant, self._write_lse, self._scale_first, self._early)
        constexprs = tuple(values.values())
        build = Build(
            flashmoe_fwd_triton, (*self._pointers, 0.5, *numbers, *constexprs), num_warps=config["num_warps"],
            num_stages=config["num_stages"], launch_pdl=self._early,
        )  # fmt: skip
        self._builds[variant] = build, constexprs
        return build, constexprs


def launches(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    return (Launch(f"^{flashmoe_fwd_triton.__name__}$", _grid(problem, config), 32 * config["num_warps"]),)


KERNEL = our_kernel(
    name=NAME,
    about="portable Triton: one program a tile of queries; quick at short sequences",
    supports=supports,
    configs=configs,
    run=run_planned(TiledLauncher),
    launches=launches,
    plan=TiledLauncher,
    suits=suits,
    interpretable=True,
)
