"""The backward of experts with low-rank adapters beside frozen weights, on Hopper: no gradient of a weight is computed.

With s the weight of a row and g2 = scaling dout b2: dA' = dout W2 + g2 a2 by the first product of moe_bwd_gluon_sm90, whose
epilogue gives dz, s A and ds; with g1 = scaling dz b1 a row of dx is dz W1 + g1 a1. Over the rows of an expert da1 = g1^T x,
db1 = dz^T u1, da2 = g2^T (s A) and db2 = dout^T (s u2), each by one program for a tile: in one order, in fp32. dout and dz are
read once for g and db, which give g as partials of 256 columns each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flashmoe_science.kernel import Config
from flashmoe_science.ops.launch import Pointer, allocator, argument, cdiv, stand_in, workspace_allocator
from flashmoe_science.ops.moe import combine
from flashmoe_science.ops.moe import rows as row_tables
from flashmoe_science.ops.moe.adapted.forward import ranks_of
from flashmoe_science.ops.moe.backward.gluon_sm90.launch import hidden, rows
from flashmoe_science.ops.moe.backward.grouped_triton.config import Tile
from flashmoe_science.ops.moe.backward.grouped_triton.kernel import build_weights
from flashmoe_science.ops.moe.backward.launch import Needs, build_routing, fitting
from flashmoe_science.ops.moe.backward.launch import parts_of as workspace_parts
from flashmoe_science.ops.moe.call import KernelLaunch, contiguous
from flashmoe_science.ops.moe.call.adapters import Adapters, LowRank, parts_of
from flashmoe_science.ops.moe.call.backward import BackwardInputs, BackwardTensors
from flashmoe_science.ops.moe.products.grouped import starts_early
from flashmoe_science.ops.moe.products.lowrank import MOST_COLUMNS, build_sum, columns_of_rank
from flashmoe_science.ops.moe.rows import RowCounts

# Of rows of tokens, of pairs in their order: two buffers of db's tiles leave room for two programs, three of da's for four. Of
# loads by tokens, which are loaded too, Triton's pipeline has fewer buffers than stages.
_STAGES_OF_B, _STAGES_OF_A = (4, 2), (5, 3)
_NEEDS = Needs(dz=True, active=True, partials=True)  # all that the first product writes, which is little more


class AdaptedGradients(NamedTuple):
    """None of what is not asked for, and of no adapter; da and db are like a and b."""

    dx: torch.Tensor | None
    dtopk_weights: torch.Tensor | None
    da1: torch.Tensor | None
    db1: torch.Tensor | None
    da2: torch.Tensor | None
    db2: torch.Tensor | None


class Side(NamedTuple):
    """The launches of one adapter: db and the partials of g, by b's side of its product; the sum of those; da."""

    db: KernelLaunch
    total: KernelLaunch
    da: KernelLaunch


Saved = tuple[torch.Tensor | None, torch.Tensor | None]  # u1 and u2 of ``forward.Made``
Backward = Callable[[BackwardTensors, Adapters, Saved], AdaptedGradients]


def plan(inputs: BackwardInputs, adapters: Adapters, config: Config) -> Callable[[BackwardInputs], Backward]:
    """bind(inputs) of all launches of a call like this, which has fitting memory, of any number of tokens. All gradients of
    adapters are made; dx and dtopk_weights where they are wanted, else neither computed nor allocated."""
    p, t, (first, second), block_m = inputs.problem, inputs.tensors, adapters, config["block_m"]
    wanted = inputs.wanted
    early, columns, x, new = starts_early(t.x), cdiv(p.hidden, config["hidden_n"]), stand_in(t.x), Pointer(t.x.dtype)
    ranks = ranks_of(adapters)
    of_first = None if first is None else _side(inputs, first, (new, p.rows_of_w1(), True), (x, t.x.stride(0), False))
    weights = stand_in(t.topk_weights)
    of_second = None if second is None else _side(inputs, second, (new, p.dim, False), (new, p.hidden, True), weights)
    products = hidden(inputs, config, ranks[1]), rows(inputs, config, ranks[0]) if wanted.dx else None
    add = combine.build(p, t.x.dtype, None, early) if wanted.dx else None
    sum_routing = build_routing(inputs, columns, early) if wanted.dtopk_weights else None
    of_parts = [None if part is None else contiguous(part.shape, part.dtype) for part in parts_of(adapters)]

    def bind(like: BackwardInputs) -> Backward:
        p, t = like.problem, like.tensors
        counts, allocate, on_gpu = RowCounts.of(p, block_m), allocator(t.x.is_cuda), t.x.is_cuda
        of_x = contiguous(t.x.shape, t.x.dtype) if wanted.dx else None
        of_weights = contiguous(t.topk_weights.shape, t.topk_weights.dtype) if wanted.dtopk_weights else None
        parts = workspace_parts(p, counts, t.x.dtype, columns, _NEEDS, wanted.dx)
        widest = max(rank * cdiv(width, _height(rank)) for rank, width in zip(ranks, (p.rows_of_w1(), p.dim), strict=True))
        low_parts = (counts.pairs * widest, torch.float32), *((counts.pairs * rank, t.x.dtype) for rank in ranks)
        take, sort = workspace_allocator(on_gpu, [*parts, *low_parts]), row_tables.bind_rows(t.topk_ids, counts, early)
        start_hidden, start_rows, routing = (None if one is None else one(counts) for one in (*products, sum_routing))
        combined = None if add is None else add(p)
        side_1, side_2 = (None if one is None else one(counts) for one in (of_first, of_second))
        assert start_hidden is not None

        def launch(tensors: BackwardTensors, adapters: Adapters, saved: Saved) -> AdaptedGradients:
            made = AdaptedGradients(*[None if one is None else allocate(*one) for one in (of_x, of_weights, *of_parts)])
            memory, tables, dz, active, partials, dx_rows, of_g, g1, g2 = take()  # kept alive to the end of this call
            dout = fitting(tensors.dout)
            d, (x, w1, w2, weights, ids, *_, z, _), (u1, u2) = argument(dout), map(argument, tensors), map(argument, saved)
            dx, to_weights, da1, db1, da2, db2 = map(argument, made)
            sort(ids, tables)
            low = _beside(side_2, d, u2, db2, adapters[1], of_g, g2, tables, weights)
            start_hidden(d, w2, z, weights, dz, active, partials, tables, *low)
            if routing is not None:
                routing(partials, d, None, ids, to_weights, tables)
            low = _beside(side_1, dz, u1, db1, adapters[0], of_g, g1, tables)
            if side_2 is not None:
                side_2.da(active, g2, da2, tables)
            if side_1 is not None:
                side_1.da(x, g1, da1, tables)
            if start_rows is not None and combined is not None:
                start_rows(dz, w1, dx_rows, tables, *low)
                combined(dx_rows, None, dx, tables)
            del memory
            return made

        return launch

    return bind


Operand = tuple[Pointer | None, int, bool]  # rows of a dtype and their stride; True: of pairs in their order, not of tokens


def _side(
    inputs: BackwardInputs, low: LowRank, of_b: Operand, of_a: Operand, weights: Pointer | None = None
) -> Callable[[RowCounts], Side]:
    """The launches of an adapter: of db by the gradient of its product, which is ``of_b``, of da by what it multiplies."""
    rank, x = low.a.shape[1], inputs.tensors.x
    height, columns, wide = _height(rank), columns_of_rank(rank), columns_of_rank(rank) == MOST_COLUMNS
    total = build_sum(x, rank, cdiv(low.b.shape[1], height))
    like_a, like_b = (torch.empty_like(one, device="meta") for one in (low.a.mT, low.b))
    rows, stride, by_row = of_b
    tile = Tile(height, columns, 64, 8, _STAGES_OF_B[by_row])
    db = build_weights(inputs, tile, rows, stride, like_b, by_row=by_row, weights=weights, factor=stand_in(low.b))
    rows, stride, by_row = of_a
    tile = Tile(MOST_COLUMNS, columns, 64, 8 if wide else 4, _STAGES_OF_A[by_row])
    da = build_weights(inputs, tile, rows, stride, like_a, by_row=by_row)
    return lambda counts: Side(db(counts), total(counts), da(counts))


def _height(rank: int) -> int:
    """Columns of what db and g are read from, of a tile: more are fewer partials, and would take too many registers."""
    return 256 if columns_of_rank(rank) < MOST_COLUMNS else 128


def _beside(
    side: Side | None,
    of_out: Any,
    u: Any,
    db: Any,
    low: LowRank | None,
    partials: Any,
    g: Any,
    tables: Any,
    weights: Any = None,
) -> tuple[Any, ...]:
    """Launch db and g of an adapter, and return what its product takes last: g and the address of a. Nothing of no adapter."""
    if side is None or low is None:
        return ()
    side.db(of_out, u, db, tables, weights, argument(low.b), partials)
    side.total(partials, g, low.scaling)
    return g, argument(low.a)
