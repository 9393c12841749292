"""The tokens of fp8 products: e4m3 with an fp32 scale to 128 columns, in the order of ``rows.py``.

Shapes: x [T, H], input scales [E] or none -> codes [P, H], scales [H / 128 rounded up, P], those of a step's rows beside each
other. With input scales, static, all of an expert's rows have its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.kernel import Launch
from flashmoe_science.ops.launch import Build, Grid, Pointer, cdiv, stand_in
from flashmoe_science.ops.moe.call import KernelLaunch
from flashmoe_science.ops.moe.products.codes import LARGEST, in_e4m3
from flashmoe_science.ops.moe.rows import RowCounts, tables_of

LEAST = tl.constexpr(2.0**-120)  # scale
BLOCK = tl.constexpr(128)
_BLOCKS, _WARPS = 8, 4  # of a program


@triton.jit
def _static(values, scale):
    """The scale of each row of values, and their codes."""
    codes = in_e4m3(tl.math.div_rn(values, tl.broadcast_to(scale, values.shape))).to(tl.float8e4nv)
    return tl.broadcast_to(scale, [values.shape[0]]), codes


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_quantize(
    x, input_scale, ids, codes, scales, flags, tables, pairs, tiles,
    FLAGS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, DEPTH: tl.constexpr, STRIDE_X: tl.constexpr,
    STRIDE_S: tl.constexpr, BLOCKS: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """Codes and scales of the rows of a token, and ``FLAGS`` flags of 0. The kernels after this one may read tables before it
    ends: it lets them start only once it has them."""
    if EARLY_START:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)  # [BLOCKS]
    k = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [BLOCKS, BLOCK]
    values = tl.load(x + token.to(tl.int64) * STRIDE_X + k, mask=k < DEPTH, other=0.0).to(tl.float32)
    if input_scale is None:
        scale = tl.maximum(tl.math.div_rn(tl.max(tl.abs(values), 1), LARGEST), LEAST)  # [BLOCKS]
        quotients = tl.math.div_rn(values, tl.broadcast_to(scale[:, None], [BLOCKS, BLOCK]))
        made = quotients.to(tl.float8e4nv)
    elif STRIDE_S == 0:
        scale, made = _static(values, tl.load(input_scale).to(tl.float32))
    row_of_pair = tables_of(tables, pairs, EXPERTS, tiles).row_of_pair
    for place in tl.static_range(TOP_K):
        row = tl.load(row_of_pair + token * TOP_K + place)
        if STRIDE_S > 0:
            expert = tl.load(ids + token * TOP_K + place)
            scale, made = _static(values, tl.load(input_scale + expert * STRIDE_S, mask=row >= 0, other=1.0).to(tl.float32))
        tl.store(codes + row.to(tl.int64) * DEPTH + k, made, mask=(row >= 0) & (k < DEPTH))
        tl.store(scales + block * pairs + row, scale, mask=(row >= 0) & (block * BLOCK < DEPTH))
    if (token == 0) & (tl.program_id(1) == 0):
        number = tl.arange(0, triton.next_power_of_2(FLAGS))
        tl.store(flags + number, 0, mask=number < FLAGS)


def scales_of(rows: int, depth: int) -> int:
    """Elements of the scales of rows that have been quantised."""
    return cdiv(depth, BLOCK.value) * rows


def build(
    x: torch.Tensor, input_scale: torch.Tensor | None, ids: torch.Tensor, experts: int, flags: int, early_start: bool
) -> Callable[[RowCounts], KernelLaunch]:
    """bind(counts): launch(x, input_scale, ids, codes, scales, flags, tables) for rows of x like these, and int32 flags; ids
    are None where there is no input scale."""
    depth, top_k = x.shape[1], ids.shape[1]
    of_input = 0 if input_scale is None else input_scale.stride(0)
    values = flags, experts, top_k, depth, x.stride(0), of_input, _BLOCKS, early_start
    pointers = stand_in(x), stand_in(input_scale), None if input_scale is None else stand_in(ids)
    made = map(Pointer, (torch.float8_e4m3fn, torch.float32, torch.int32, torch.int32))
    built = Build(flashmoe_moe_quantize, (*pointers, *made, 2, 2, *values), num_warps=_WARPS, launch_pdl=early_start)
    return lambda rows: built.bound(_grid(rows.pairs // top_k, depth), rows.pairs, rows.tiles, *values)


def launch_of(tokens: int, depth: int) -> Launch:
    """The launch of ``build``."""
    return Launch(f"^{flashmoe_moe_quantize.__name__}$", _grid(tokens, depth), 32 * _WARPS)


def _grid(tokens: int, depth: int) -> Grid:
    return tokens, cdiv(depth, BLOCK.value * _BLOCKS), 1
