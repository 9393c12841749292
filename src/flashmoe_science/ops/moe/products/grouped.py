"""A grouped mixture of experts as launches of its own: rows, up product, down product, combine. Each can be bound by itself.

Rows are sorted by expert (``rows.py``). The up product gathers rows of x, and its epilogue is the activation; the down product
gives a row for each (token, expert) pair; combine weights and sums them by token (``combine.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashmoe_science.kernel import CannotServe, Config, Launch
from flashmoe_science.ops.launch import (
    INTERPRETING,
    Part,
    address,
    allocator,
    can_start_early,
    stand_in,
    workspace_allocator,
    workspace_bytes,
)
from flashmoe_science.ops.moe import combine, rows
from flashmoe_science.ops.moe.call import Bind, KernelLaunch, MoEInputs, MoELaunch, Rows, Shape, contiguous
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.formats import address_of_weights
from flashmoe_science.ops.moe.route.triton import launches_of, routing_bytes, why_no_router
from flashmoe_science.ops.moe.rows import RowCounts

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# bind(counts) of a grouped product that is built, for any number of rows, which writes out[row] of every row of the tables:
# launch(x, w, scale, zero_point, input_scale, bias, out, z, tables) of the up product; of the down product without z, and x is
# what the up product wrote. ``scale``, ``zero_point`` and ``input_scale`` are None of weights that have none.
Product = Callable[[RowCounts], KernelLaunch]


def starts_early(x: torch.Tensor) -> bool:
    """Whether launches of a call start while those before them finish. Raises CannotServe: no kernel reads such rows of x."""
    if x.stride(1) != 1:
        raise CannotServe(f"hidden_states has stride {x.stride(1)} in its last dimension; it must be 1")
    return not INTERPRETING and can_start_early(x.device)


def up_constexprs(inputs: MoEInputs) -> dict[str, Any]:
    """The first constexprs of a first product: all but its tiles."""
    p, a, (x, w1, *_) = inputs.problem, inputs.activation, inputs.tensors
    return {
        "EXPERTS": p.experts, "TOP_K": p.top_k, "DEPTH": p.dim, "WIDTH": p.hidden,
        "STRIDE_X": x.stride(0), "STRIDE_E": w1.stride(0), "STRIDE_N": w1.stride(1), "STRIDE_K": w1.stride(2),
        "FUNCTION": a.function, "GATED": a.gated, "INTERLEAVED": a.interleaved, "ALPHA": a.alpha, "LIMIT": a.limit,
    }  # fmt: skip


def down_constexprs(inputs: MoEInputs) -> dict[str, Any]:
    """The first constexprs of a second product: all but its tiles."""
    p, w2 = inputs.problem, inputs.tensors.w2
    return {
        "EXPERTS": p.experts, "DEPTH": p.hidden, "WIDTH": p.dim,
        "STRIDE_E": w2.stride(0), "STRIDE_N": w2.stride(1), "STRIDE_K": w2.stride(2),
    }  # fmt: skip


def grouped(inputs: MoEInputs, config: Config, bind_up: Product, bind_down: Product) -> Bind:
    """bind(inputs, shape) of all launches of a call by two products."""
    early = starts_early(inputs.tensors.x)
    tensors, saves_z, sums = inputs.tensors, inputs.saves_z, inputs.sums
    bind_combine = combine.build(inputs.problem, tensors.x.dtype, stand_in(tensors.topk_weights), early)

    def bind(like: MoEInputs, shape: Shape) -> MoELaunch:
        p, (x, _, _, _, ids, *_) = like.problem, like.tensors
        counts, result = RowCounts.of(p, config["block_m"]), contiguous(shape, x.dtype)
        of_z = contiguous((counts.pairs, p.rows_of_w1()), x.dtype) if saves_z else None
        take, allocate = workspace_allocator(x.is_cuda, _workspace(p, counts)), allocator(x.is_cuda)
        sort, up, down, add = rows.bind_rows(ids, counts, early), bind_up(counts), bind_down(counts), bind_combine(p)

        def call(
            x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None,
            gate_up_scale: torch.Tensor | None = None, down_scale: torch.Tensor | None = None,
            gate_up_zero_point: torch.Tensor | None = None, down_zero_point: torch.Tensor | None = None,
            gate_up_input_scale: torch.Tensor | None = None, down_input_scale: torch.Tensor | None = None,
        ) -> Any:  # fmt: skip
            memory, tables, active, products = take()  # kept alive to the end of this call
            sort(address(ids), tables)
            z = None if of_z is None else allocate(*of_z)
            scale = None if gate_up_scale is None else address(gate_up_scale)  # by a function it would be a frame each
            zero = None if gate_up_zero_point is None else address(gate_up_zero_point)
            input_scale = None if gate_up_input_scale is None else address(gate_up_input_scale)
            bias = None if gate_up_bias is None else address(gate_up_bias)
            to_z = None if z is None else address(z)
            up(address(x), address_of_weights(w1), scale, zero, input_scale, bias, active, to_z, tables)
            scale = None if down_scale is None else address(down_scale)
            zero = None if down_zero_point is None else address(down_zero_point)
            input_scale = None if down_input_scale is None else address(down_input_scale)
            bias = None if down_bias is None else address(down_bias)
            down(active, address_of_weights(w2), scale, zero, input_scale, bias, products, tables)
            if not sums:
                return Rows(memory, products, tables)
            out = allocate(*result)
            add(products, address(weights), address(out), tables)
            return out if z is None else (out, z)

        return call

    return bind


def why_not_grouped(problem: MoEProblem) -> str | None:
    """Why the rows of a problem cannot be sorted, or routed before; None where they can."""
    return rows.why_no_tables(problem) or why_no_router(problem)


def workspace(problem: MoEProblem, config: Config) -> int:
    """Bytes of the tables, the rows between the products and after the second, and of what a router before them chose."""
    return workspace_bytes(_workspace(problem, RowCounts.of(problem, config["block_m"]))) + routing_bytes(problem)


def _workspace(problem: MoEProblem, counts: RowCounts) -> tuple[Part, ...]:
    dtype, pairs = DTYPES[problem.dtype], counts.pairs
    return (counts.length, torch.int32), (pairs * problem.hidden, dtype), (pairs * problem.dim, dtype)


def launches_around(problem: MoEProblem, config: Config, *products: Launch) -> tuple[Launch, ...]:
    """All launches of a call by two products, a router's before them."""
    counts = RowCounts.of(problem, config["block_m"])
    return (*launches_of(problem), *rows.launches(counts), *products, *combine.launches(problem))
