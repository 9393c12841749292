"""The last launch of a grouped mixture: a token's rows, times their routing weights, are summed in a fixed order in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.kernel import Launch
from flashmoe_science.ops.launch import Build, Grid, Pointer, argument, cdiv, kept_build, next_power_of_2, stand_in
from flashmoe_science.ops.moe.call import KernelLaunch
from flashmoe_science.ops.moe.problem import MoEProblem

_MAX_BLOCK = 1024  # columns of a program
_WARPS = 4


@triton.jit(do_not_specialize=["pairs"])
def flashmoe_moe_combine(
    rows, weights, out, tables, pairs,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """out[token] = the sum over its choices, in their order, of weight times row; a choice without a row adds nothing.
    ``weights``: None for 1."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    acc = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        row = tl.load(tables + pairs + token * TOP_K + place).to(tl.int64)
        if weights is not None:
            weight = tl.load(weights + token * TOP_K + place).to(tl.float32)
        value = tl.load(rows + row * WIDTH + columns, mask=(row >= 0) & (columns < WIDTH), other=0.0).to(tl.float32)  # [BLOCK]
        if weights is not None:
            value = weight * value
        acc += tl.where(row >= 0, value, 0.0)
    tl.store(out + token * WIDTH + columns, acc.to(out.dtype.element_ty), mask=columns < WIDTH)


def build(
    problem: MoEProblem, dtype: torch.dtype, weights: Pointer | None, early_start: bool
) -> Callable[[MoEProblem], KernelLaunch]:
    """bind(problem): launch(rows, weights, out, tables) for problems like this of any number of tokens, with rows [pairs, dim]
    and out [tokens, dim] of a dtype, and weights [tokens, top_k], which are 1 where there are none."""
    constexprs = (problem.top_k, problem.dim, _block(problem.dim), early_start)
    arguments = (Pointer(dtype), weights, Pointer(dtype), Pointer(torch.int32), 2, *constexprs)
    built = Build(flashmoe_moe_combine, arguments, num_warps=_WARPS, launch_pdl=early_start)
    return lambda like: built.bound(_grid(like.tokens, like.dim), like.pairs(), *constexprs)


def combined(rows: torch.Tensor, weights: torch.Tensor | None, row_of_pair: torch.Tensor) -> torch.Tensor:
    """[T, H]: the sums of a call, of contiguous rows [R, H] that were computed elsewhere. ``weights``: [T, K]; None for 1.
    ``row_of_pair``: [T, K], -1 where a choice has no row."""
    (tokens, top_k), dim = row_of_pair.shape, rows.shape[1]
    constexprs = (top_k, dim, _block(dim), False)
    out, tables = rows.new_empty(tokens, dim), row_of_pair.int().expand(2, -1, -1).contiguous()  # its second part is read
    given = (rows, None if weights is None else weights.contiguous(), out, tables)
    key = (rows.device, constexprs, *(None if one is None else (one.dtype, one.data_ptr() % 16) for one in given))
    with torch.cuda.device_of(rows):
        built = kept_build(key, flashmoe_moe_combine, (*map(stand_in, given), 2, *constexprs), num_warps=_WARPS)
        built.launch(_grid(tokens, dim), *map(argument, given), row_of_pair.numel(), *constexprs)
    return out


def launches(problem: MoEProblem) -> tuple[Launch, ...]:
    """The launch of ``build``."""
    return (Launch(f"^{flashmoe_moe_combine.__name__}$", _grid(problem.tokens, problem.dim), 32 * _WARPS),)


def _grid(tokens: int, dim: int) -> Grid:
    return tokens, cdiv(dim, _block(dim)), 1


def _block(dim: int) -> int:
    return min(_MAX_BLOCK, max(16, next_power_of_2(dim)))
