"""The tokens of fp8 products: e4m3 with an fp32 scale to 128 columns, in the order of ``rows.py``.

Shapes: x [T, H] -> codes [P, H], scales [H / 128 rounded up, P], those of a step's rows beside each other.
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
from flashmoe_science.ops.moe.rows import RowCounts, tables_of

LARGEST, LEAST = tl.constexpr(448.0), tl.constexpr(2.0**-120)  # the largest e4m3, and the least scale
BLOCK = tl.constexpr(128)
_BLOCKS, _WARPS = 8, 4  # of a program


@triton.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_quantize(
    x, codes, scales, flags, tables, pairs, tiles,
    FLAGS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, DEPTH: tl.constexpr, STRIDE_X: tl.constexpr,
    BLOCKS: tl.constexpr, EARLY_START: tl.constexpr,
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
    scale = tl.maximum(tl.math.div_rn(tl.max(tl.abs(values), 1), LARGEST), LEAST)  # [BLOCKS]
    quotients = tl.math.div_rn(values, tl.broadcast_to(scale[:, None], [BLOCKS, BLOCK]))
    made = quotients.to(tl.float8e4nv)
    row_of_pair = tables_of(tables, pairs, EXPERTS, tiles).row_of_pair
    for place in tl.static_range(TOP_K):
        row = tl.load(row_of_pair + token * TOP_K + place)
        tl.store(codes + row.to(tl.int64) * DEPTH + k, made, mask=(row >= 0) & (k < DEPTH))
        tl.store(scales + block * pairs + row, scale, mask=(row >= 0) & (block * BLOCK < DEPTH))
    if (token == 0) & (tl.program_id(1) == 0):
        number = tl.arange(0, triton.next_power_of_2(FLAGS))
        tl.store(flags + number, 0, mask=number < FLAGS)


def scales_of(rows: int, depth: int) -> int:
    """Elements of the scales of rows that have been quantised."""
    return cdiv(depth, BLOCK.value) * rows


def build(x: torch.Tensor, experts: int, top_k: int, flags: int, early_start: bool) -> Callable[[RowCounts], KernelLaunch]:
    """bind(counts): launch(x, codes, scales, flags, tables) for rows of x like these, and int32 flags."""
    depth = x.shape[1]
    values = flags, experts, top_k, depth, x.stride(0), _BLOCKS, early_start
    pointers = stand_in(x), Pointer(torch.float8_e4m3fn), Pointer(torch.float32), Pointer(torch.int32), Pointer(torch.int32)
    built = Build(flashmoe_moe_quantize, (*pointers, 2, 2, *values), num_warps=_WARPS, launch_pdl=early_start)
    return lambda rows: built.bound(_grid(rows.pairs // top_k, depth), rows.pairs, rows.tiles, *values)


def launch_of(tokens: int, depth: int) -> Launch:
    """The launch of ``build``."""
    return Launch(f"^{flashmoe_moe_quantize.__name__}$", _grid(tokens, depth), 32 * _WARPS)


def _grid(tokens: int, depth: int) -> Grid:
    return tokens, cdiv(depth, BLOCK.value * _BLOCKS), 1
