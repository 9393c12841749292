"""All launches of a backward by four products, in a fixed order; what is not wanted is neither computed nor allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from flashmoe_science.kernel import Launch
from flashmoe_science.ops.launch import (
    Build,
    Part,
    Pointer,
    address,
    allocator,
    argument,
    cdiv,
    stand_in,
    workspace_allocator,
    workspace_bytes,
)
from flashmoe_science.ops.moe import combine, rows
from flashmoe_science.ops.moe.backward.sums import (
    BIAS_COLUMNS,
    BIAS_ROWS,
    BIAS_WARPS,
    ROUTING_COLUMNS,
    ROUTING_ROWS,
    ROUTING_WARPS,
    flashmoe_moe_dbias,
    flashmoe_moe_drouting,
)
from flashmoe_science.ops.moe.call import KernelLaunch
from flashmoe_science.ops.moe.call.backward import (
    NEW,
    BackwardBind,
    BackwardInputs,
    BackwardLaunch,
    BackwardTensors,
    Gradients,
    Sums,
    Wanted,
    gradients_like,
)
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem
from flashmoe_science.ops.moe.products.grouped import DTYPES, starts_early
from flashmoe_science.ops.moe.route.step import workspace_around
from flashmoe_science.ops.moe.rows import RowCounts

Product = Callable[[RowCounts], KernelLaunch]


class Products(NamedTuple):
    """bind(counts) of the products that a call has, built for any number of rows; None where nothing that is wanted needs one.

    hidden(dout, w2, z, weights, dz, active, partials, tables); rows(dz, w1, out, tables), of each row the gradient of x;
    dw1(x, dz, out, tables); dw2(dout, active, out, tables).
    """

    hidden: Product | None
    rows: Product | None
    dw1: Product | None
    dw2: Product | None


class Needs(NamedTuple):
    """What the first product writes, by the gradients that are wanted."""

    dz: bool
    active: bool
    partials: bool


def needs_of(inputs: BackwardInputs) -> Needs:
    wanted = wanted_of(inputs)
    return Needs(wanted.dx or wanted.dw1 or wanted.dgate_up_bias, wanted.dw2, wanted.dtopk_weights)


def wanted_of(inputs: BackwardInputs) -> Wanted:
    """What is wanted, and can be."""
    tensors, wanted = inputs.tensors, inputs.wanted
    return wanted._replace(
        dgate_up_bias=wanted.dgate_up_bias and tensors.gate_up_bias is not None,
        ddown_bias=wanted.ddown_bias and tensors.down_bias is not None,
    )


def parts_of(problem: MoEProblem, counts: RowCounts, dtype: torch.dtype, columns: int, needs: Needs, dx: bool) -> list[Part]:
    """The workspace: tables and two counters of tiles of dW, dz, active, partials, rows of dX; ``columns`` partials a row."""
    pairs = counts.pairs
    return [
        (counts.length + 2, torch.int32),
        (pairs * problem.rows_of_w1() * needs.dz, dtype),
        (pairs * problem.hidden * needs.active, dtype),
        (pairs * columns * needs.partials, torch.float32),
        (pairs * problem.dim * dx, dtype),
    ]


def workspace_of(problem: MoEBackwardProblem, block_m: int, columns: int) -> int:
    """Bytes of the tables and of the rows between the products where every gradient is wanted; of a step all that it takes."""
    needs = Needs(dz=True, active=True, partials=True)
    parts = parts_of(problem, RowCounts.of(problem, block_m), DTYPES[problem.dtype], columns, needs, dx=True)
    return workspace_around(problem, workspace_bytes(parts))


def grouped_backward(inputs: BackwardInputs, block_m: int, columns: int, products: Products, needs: Needs) -> BackwardBind:
    """bind(inputs) of all launches of a call by four products. ``columns``: partials of a row's routing weight; ``needs``: what
    the first product writes."""
    early, t, wanted = starts_early(inputs.tensors.x), inputs.tensors, wanted_of(inputs)
    add = combine.build(inputs.problem, t.x.dtype, None, early) if wanted.dx else None
    sum_routing = build_routing(inputs, columns, early) if wanted.dtopk_weights else None
    of_z = _build_bias(inputs, t.z, None, t.gate_up_bias, early) if wanted.dgate_up_bias else None
    of_out = _build_bias(inputs, t.dout, t.topk_weights, t.down_bias, early) if wanted.ddown_bias else None

    def bind(like: BackwardInputs) -> BackwardLaunch:
        p, x, ids = like.problem, like.tensors.x, like.tensors.topk_ids
        counts, new = RowCounts.of(p, block_m), allocator(x.is_cuda)
        of_gradients = gradients_like(like.tensors, like.wanted, like.sums)
        take = workspace_allocator(x.is_cuda, parts_of(p, counts, x.dtype, columns, needs, wanted.dx))
        sort = rows.bind_rows(ids, counts, early)
        hidden, of_rows, dw1, dw2 = (None if one is None else one(counts) for one in products)
        combined = None if add is None else add(p)
        routing, bias_1, bias_2 = (None if one is None else one(counts) for one in (sum_routing, of_z, of_out))

        def launch(tensors: BackwardTensors, sums: Sums = NEW) -> Gradients:
            made = Gradients(*[None if one is None else new(*one) for one in of_gradients])
            if sums is not NEW:
                made = made._replace(**{name: one for name, one in sums._asdict().items() if one is not None})
            memory, tables, dz, active, partials, of_x = take()  # kept alive to the end of this call
            dout = fitting(tensors.dout)
            x, w1, w2, weights, ids, _, down_bias, *_, z, _ = map(argument, tensors)
            d = address(dout)
            dx, to_w1, to_w2, to_weights, to_bias_1, to_bias_2 = map(argument, made)
            sort(ids, tables)
            if hidden is not None:
                given = (one if needed else None for one, needed in zip((dz, active, partials), needs, strict=True))
                hidden(d, w2, z, weights, *given, tables)
            if routing is not None:
                routing(partials, d, down_bias, ids, to_weights, tables)
            if dw2 is not None:
                dw2(d, active, to_w2, tables)
            if dw1 is not None:
                dw1(x, dz, to_w1, tables)
            if bias_1 is not None:
                bias_1(dz, None, to_bias_1, tables)
            if bias_2 is not None:
                bias_2(d, weights, to_bias_2, tables)
            if of_rows is not None and combined is not None:
                of_rows(dz, w1, of_x, tables)
                combined(of_x, None, dx, tables)
            del memory
            return made

        return launch

    return bind


def fitting(dout: torch.Tensor) -> torch.Tensor:
    """A gradient as kernels take it, copied where it is expanded, say, or begins between two multiples of 16 bytes."""
    fits = dout.is_contiguous() and dout.data_ptr() % 16 == 0
    return dout if fits else dout.clone(memory_format=torch.contiguous_format)


def build_routing(inputs: BackwardInputs, columns: int, early: bool) -> Product:
    """launch(partials, dout, down_bias, ids, out, tables)."""
    p, t = inputs.problem, inputs.tensors
    values = (columns, p.top_k, p.dim, ROUTING_ROWS, ROUTING_COLUMNS, early)
    pointers = (Pointer(torch.float32), Pointer(t.dout.dtype), *map(stand_in, (t.down_bias, t.topk_ids)))
    arguments = (*pointers, Pointer(t.topk_weights.dtype), Pointer(torch.int32), 2, *values)
    build = Build(flashmoe_moe_drouting, arguments, num_warps=ROUTING_WARPS, launch_pdl=early)
    return lambda counts: build.bound((cdiv(counts.pairs, ROUTING_ROWS), 1, 1), counts.pairs, *values)


def launch_of_routing(counts: RowCounts) -> Launch:
    """The launch of the gradient of the routing weights."""
    return Launch(f"^{flashmoe_moe_drouting.__name__}$", (cdiv(counts.pairs, ROUTING_ROWS), 1, 1), 32 * ROUTING_WARPS)


def _build_bias(
    inputs: BackwardInputs, summed: torch.Tensor, weights: torch.Tensor | None, bias: torch.Tensor | None, early: bool
) -> Product:
    """launch(values, weights, out, tables) of the gradient of a bias: of rows like ``summed``, with weights of its tokens."""
    p, width = inputs.problem, summed.shape[1]
    assert bias is not None
    values = (p.experts, p.top_k, width, BIAS_COLUMNS, BIAS_ROWS, early)
    arguments = (Pointer(summed.dtype), stand_in(weights), Pointer(bias.dtype), Pointer(torch.int32), 2, 2, *values)
    build = Build(flashmoe_moe_dbias, arguments, num_warps=BIAS_WARPS, launch_pdl=early)
    grid = (p.experts * cdiv(width, BIAS_COLUMNS), 1, 1)
    return lambda counts: build.bound(grid, counts.pairs, counts.tiles, *values)


def launches_of_biases(problem: MoEProblem) -> tuple[Launch, ...]:
    """The launches of the gradients of both biases, where the problem has them."""
    widths = (problem.rows_of_w1(), problem.dim) if problem.bias else ()
    grids = ((problem.experts * cdiv(width, BIAS_COLUMNS), 1, 1) for width in widths)
    return tuple(Launch("^flashmoe_moe_dbias$", grid, 32 * BIAS_WARPS) for grid in grids)
