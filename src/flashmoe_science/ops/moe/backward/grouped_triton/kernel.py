"""Backward of a mixture of experts in portable Triton: four grouped products over rows sorted by expert.

Shapes: x, dout [T, H], w1 [E, 2I, H] (or [E, I, H]), w2 [E, H, I], any strides, weights and ids [T, K], the forward's z [P, 2I]
(or [P, I]) -> dx [T, H], dw1, dw2, dweights [T, K], dbiases [E, 2I] and [E, H], each in the dtype of what it is the gradient
of. fp16, bf16 and fp32 (as six bf16 products), sums in fp32; sm_80 and up.

With A = act(z) and s the weight of a row: dA' = dout W2 and in its epilogue (hidden.py) ds = <dA', A>, dz = act'(z) s dA' and
s A; dW2 = dout^T (s A) and dW1 = x^T dz over the rows of each expert (weights.py); dx = the sum over a token's rows of dz W1.
No two programs add to one result: all sums are in one order, and equal calls give equal bits. What is not asked for is not
computed.
"""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.launch import INTERPRETING, Build, Pointer, cdiv, stand_in
from flashmoe_science.ops.moe import combine, rows
from flashmoe_science.ops.moe.backward.grouped_triton.config import HIDDEN, ROWS, WEIGHTS, Tile, configs, supports, tile_of
from flashmoe_science.ops.moe.backward.grouped_triton.hidden import flashmoe_moe_dhidden
from flashmoe_science.ops.moe.backward.grouped_triton.weights import flashmoe_moe_dweights
from flashmoe_science.ops.moe.backward.launch import (
    Needs,
    Product,
    Products,
    grouped_backward,
    launch_of_routing,
    launches_of_biases,
    needs_of,
    wanted_of,
    workspace_of,
)
from flashmoe_science.ops.moe.call.backward import BackwardBind, BackwardInputs, our_kernel, run_of
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem
from flashmoe_science.ops.moe.products.down import flashmoe_moe_down
from flashmoe_science.ops.moe.products.grouped import starts_early
from flashmoe_science.ops.moe.products.tiles import GROUP, build_product, grid_of
from flashmoe_science.ops.moe.route.step import launches_around
from flashmoe_science.ops.moe.rows import RowCounts

NAME = "moe_bwd_triton"


def plan(inputs: BackwardInputs, config: Config) -> BackwardBind:
    wanted, needs = wanted_of(inputs), needs_of(inputs)
    t, of_hidden, of_weights = inputs.tensors, tile_of(config, HIDDEN), tile_of(config, WEIGHTS)
    dw1, dw2 = inputs.sums
    x, new = stand_in(t.x), Pointer(t.x.dtype)
    products = Products(
        build_hidden(inputs, config, needs) if any(needs) else None,
        build_rows(inputs, config) if wanted.dx else None,
        # dW1 [E, 2I, H] is written as [E, H, 2I], so that what is gathered, x or dout, is on one side.
        build_weights(inputs, of_weights, x, t.x.stride(0), _result(t.w1, dw1).mT, dw1 is not None) if wanted.dw1 else None,
        build_weights(inputs, of_weights, new, t.x.shape[1], _result(t.w2, dw2), dw2 is not None) if wanted.dw2 else None,
    )
    return grouped_backward(inputs, of_hidden.m, cdiv(inputs.problem.hidden, of_hidden.n), products, needs)


def _schedule(inputs: BackwardInputs, stages: int) -> dict[str, Any]:
    """The constexprs that every product ends with."""
    precision = "bf16x6" if inputs.problem.dtype == "fp32" else "tf32"
    early = starts_early(inputs.tensors.x)
    return {"NUM_STAGES": stages, "PRECISION": precision, "INTERPRET": INTERPRETING, "EARLY_START": early}


def build_hidden(inputs: BackwardInputs, config: Config, needs: Needs) -> Product:
    p, a, t, tile = inputs.problem, inputs.activation, inputs.tensors, tile_of(config, HIDDEN)
    _, of_depth, of_column = t.w2.stride()
    constexprs = {
        "EXPERTS": p.experts, "TOP_K": p.top_k, "DEPTH": p.dim, "WIDTH": p.hidden,
        "STRIDE_X": p.dim, "STRIDE_E": t.w2.stride(0), "STRIDE_N": of_column, "STRIDE_K": of_depth,
        "FUNCTION": a.function, "GATED": a.gated, "INTERLEAVED": a.interleaved, "ALPHA": a.alpha, "LIMIT": a.limit,
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": GROUP, **_schedule(inputs, tile.stages),
    }  # fmt: skip
    new = Pointer(t.x.dtype)
    written = (new if needs.dz else None, new if needs.active else None, Pointer(torch.float32) if needs.partials else None)
    pointers = (new, *map(stand_in, (t.w2, t.z, t.topk_weights)), *written)
    return build_product(flashmoe_moe_dhidden, pointers, constexprs, tile.warps, tile.stages)


def build_rows(inputs: BackwardInputs, config: Config) -> Product:
    """The product that gives each row's gradient of x: the forward's second product, by w1 transposed."""
    p, w1, tile = inputs.problem, inputs.tensors.w1, tile_of(config, ROWS)
    of_expert, of_depth, of_column = w1.stride()
    constexprs = {
        "EXPERTS": p.experts, "DEPTH": p.rows_of_w1(), "WIDTH": p.dim,
        "STRIDE_E": of_expert, "STRIDE_N": of_column, "STRIDE_K": of_depth,
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": GROUP, **_schedule(inputs, tile.stages),
        "SCALES": None,
    }  # fmt: skip
    new = Pointer(w1.dtype)
    pointers = new, stand_in(w1), None, None, None, None, new
    bind = build_product(flashmoe_moe_down, pointers, constexprs, tile.warps, tile.stages)

    def bound(counts: RowCounts) -> Any:
        start = bind(counts)
        return lambda dz, w, out, tables: start(dz, w, None, None, None, None, out, tables)

    return bound


def _result(weights: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    """The tensor for a weight's gradient; a meta tensor of its shape where that is not wanted."""
    return torch.empty_like(weights, device="meta") if total is None else total


def build_weights(
    inputs: BackwardInputs, tile: Tile, gathered: Pointer | None, stride: int, out: torch.Tensor, adds: bool = False,
    by_row: bool = False, weights: Pointer | None = None, factor: Pointer | None = None,
) -> Product:  # fmt: skip
    """launch(gathered, other, out, tables) of a weight's gradient, which is like ``out`` [E, H, width of other]. ``by_row``:
    what is gathered has rows in their order. In a launch come last ``weights`` of pairs, and a ``factor`` and its partials."""
    p = inputs.problem
    _, height, width = out.shape
    values = (
        p.experts, None if by_row else p.top_k, height, width, stride, *out.stride(), adds, tile.m, tile.n, tile.k,
        *_schedule(inputs, tile.stages).values(),
    )  # fmt: skip
    of_factor = (factor, None if factor is None else Pointer(torch.float32))
    other = Pointer(inputs.tensors.x.dtype)
    arguments = (gathered, other, weights, *of_factor, stand_in(out), Pointer(torch.int32), 2, 2, *values)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": starts_early(inputs.tensors.x)}
    build = Build(flashmoe_moe_dweights, arguments, **options)
    grid = (p.experts * cdiv(height, tile.m) * cdiv(width, tile.n), 1, 1)

    def bound(counts: RowCounts) -> Any:
        start = build.bound(grid, counts.pairs, counts.tiles, *values)

        def launch(
            gathered: Any, other: Any, out: Any, tables: Any, weights: Any = None, factor: Any = None, partials: Any = None
        ) -> None:
            start(gathered, other, weights, factor, partials, out, tables)

        return launch

    return bound


def workspace(problem: MoEBackwardProblem, config: Config) -> int:
    tile = tile_of(config, HIDDEN)
    return workspace_of(problem, tile.m, cdiv(problem.hidden, tile.n))


def launches(problem: MoEBackwardProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    """The launches of a call that asks for every gradient; in a training step, with those around it."""
    hidden, of_rows, of_weights = (tile_of(config, one) for one in (HIDDEN, ROWS, WEIGHTS))
    counts = RowCounts.of(problem, hidden.m)
    grids = [
        (problem.experts * cdiv(problem.dim, of_weights.m) * cdiv(width, of_weights.n), 1, 1)
        for width in (problem.hidden, problem.rows_of_w1())
    ]
    return launches_around(
        problem,
        gpu,
        *rows.launches(counts),
        Launch("^flashmoe_moe_dhidden$", grid_of(counts, problem.hidden, hidden.n), 32 * hidden.warps),
        launch_of_routing(counts),
        *(Launch("^flashmoe_moe_dweights$", grid, 32 * of_weights.warps) for grid in grids),
        *launches_of_biases(problem),
        Launch("^flashmoe_moe_down$", grid_of(counts, problem.dim, of_rows.n), 32 * of_rows.warps),
        *combine.launches(problem),
    )


KERNEL = our_kernel(
    name=NAME,
    about="portable Triton: four grouped products over rows sorted by expert; deterministic, every activation and layout",
    supports=supports,
    configs=configs,
    run=run_of(plan),
    launches=launches,
    plan=plan,
    workspace=workspace,
    interpretable=True,
)
