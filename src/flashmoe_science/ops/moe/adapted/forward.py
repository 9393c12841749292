"""The forward of experts with low-rank adapters beside frozen weights, on Hopper.

The products are those of moe_grouped_gluon_sm90, each deeper by its adapter's rank: z = W1 x + b1 u1 with u1 = scaling a1 x,
and W2 A + b2 u2 with u2 = scaling a2 A. The sums are fp32, before z is rounded and activated, and before rows are weighted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.launch import allocator, argument, stand_in, workspace_allocator
from flashmoe_science.ops.moe import combine
from flashmoe_science.ops.moe import rows as row_tables
from flashmoe_science.ops.moe.call import MoEInputs, Tensors, contiguous
from flashmoe_science.ops.moe.call.adapters import Adapters
from flashmoe_science.ops.moe.products.gluon_sm90.config import check_memory
from flashmoe_science.ops.moe.products.gluon_sm90.kernel import flashmoe_moe_down_gluon_sm90, flashmoe_moe_up_gluon_sm90
from flashmoe_science.ops.moe.products.gluon_sm90.launch import down, up
from flashmoe_science.ops.moe.products.grouped import starts_early
from flashmoe_science.ops.moe.products.lowrank import beside, build_lowrank
from flashmoe_science.ops.moe.rows import RowCounts


class Made(NamedTuple):
    """The result, and what a backward needs, of which z is None unless it is saved: z [P, 2I], and of each adapter scaling
    times a times what it multiplies, u1 and u2 [P, rank]. Rows are those of ``BackwardTensors``."""

    out: torch.Tensor
    z: torch.Tensor | None
    u1: torch.Tensor | None
    u2: torch.Tensor | None


Forward = Callable[[Tensors, Adapters], Made]


def ranks_of(adapters: Adapters) -> tuple[int, int]:
    """0 of no adapter."""
    first, second = (0 if low is None else low.a.shape[1] for low in adapters)
    return first, second


def why_not_memory(inputs: MoEInputs, adapters: Adapters) -> str | None:
    """Why the copy engine does not take the memory of a call, in words; None where it does."""
    x, w1, w2, *_ = inputs.tensors
    parts = {f"{part} of adapters[{nth}]": getattr(low, part) for nth, low in enumerate(adapters) if low for part in "ab"}
    try:
        check_memory(hidden_states=x, w1=w1, w2=w2, **parts)
    except CannotServe as reason:
        return str(reason)
    return None


def plan(inputs: MoEInputs, adapters: Adapters, config: Config) -> Callable[[MoEInputs], Forward]:
    """bind(inputs) of all launches of a call like this, which has fitting memory, of any number of tokens."""
    p, t, (first, second), block_m = inputs.problem, inputs.tensors, adapters, config["block_m"]
    early, ranks = starts_early(t.x), ranks_of(adapters)
    of_x = None if first is None else build_lowrank(p, t.x, block_m, first, t.x.stride(0), gathered=True)
    of_active = None if second is None else build_lowrank(p, t.x, block_m, second, p.hidden, gathered=False)
    bind_up = up(flashmoe_moe_up_gluon_sm90, inputs, config, ranks[0])
    bind_down = down(flashmoe_moe_down_gluon_sm90, inputs, config, ranks[1])
    bind_combine = combine.build(p, t.x.dtype, stand_in(t.topk_weights), early)

    def bind(like: MoEInputs) -> Forward:
        p, x = like.problem, like.tensors.x
        counts, new, pairs = RowCounts.of(p, block_m), allocator(x.is_cuda), p.pairs()
        widths = p.rows_of_w1() * like.saves_z, *ranks
        results = [contiguous(x.shape, x.dtype), *(contiguous((pairs, width), x.dtype) if width else None for width in widths)]
        parts = (counts.length, torch.int32), (pairs * p.hidden, x.dtype), (pairs * p.dim, x.dtype)
        take, sort = workspace_allocator(x.is_cuda, parts), row_tables.bind_rows(like.tensors.topk_ids, counts, early)
        low_1, low_2 = (None if one is None else one(counts) for one in (of_x, of_active))
        start_up, start_down, add = bind_up(counts), bind_down(counts), bind_combine(p)

        def launch(tensors: Tensors, adapters: Adapters) -> Made:
            memory, tables, active, products = take()  # kept alive to the end of this call
            made = [None if one is None else new(*one) for one in results]
            out, z, u1, u2 = map(argument, made)
            x, w1, w2, weights, ids = map(argument, tensors[:5])
            sort(ids, tables)
            start_up(x, w1, None, None, None, None, active, z, tables, *beside(low_1, x, adapters[0], u1, tables))
            low = beside(low_2, active, adapters[1], u2, tables)
            start_down(active, w2, None, None, None, None, products, tables, *low)
            add(products, weights, out, tables)
            del memory
            return Made(*made)  # type: ignore[arg-type]  # of which the first is not None

        return launch

    return bind
