"""A grouped mixture of experts as launches of its own: rows, up product, down product, combine. Each can be bound by itself.

Rows are sorted by expert (``rows.py``). The up product gathers rows of x, and its epilogue is the activation; the down product
gives a row for each (token, expert) pair; combine weights and sums them by token (``combine.py``).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from flashmoe_science.kernel import CannotServe, Config, Launch
from flashmoe_science.ops.launch import (
    DIRECT,
    INTERPRETING,
    Part,
    address,
    allocator,
    can_start_early,
    workspace_allocator,
    workspace_bytes,
)
from flashmoe_science.ops.moe import combine, rows
from flashmoe_science.ops.moe.call import KernelLaunch, MoEInputs, MoELaunch, MoELauncher, Outputs, Shape
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.route.triton import launches_of, routing_bytes, why_no_router
from flashmoe_science.ops.moe.rows import RowCounts

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Product(Protocol):
    """A grouped product that is built, for any number of rows."""

    def bind(self, counts: RowCounts) -> KernelLaunch:
        """launch(a, w, bias, out, tables): out[row] of every row of the tables; a is x, or what the up product wrote."""


def starts_early(inputs: MoEInputs) -> bool:
    """Whether launches of a call start while those before them finish. Raises CannotServe: no kernel reads such rows of x."""
    if inputs.x.stride(1) != 1:
        raise CannotServe(f"hidden_states has stride {inputs.x.stride(1)} in its last dimension; it must be 1")
    return not INTERPRETING and can_start_early(inputs.x.device)


def _handle(tensor: torch.Tensor) -> Any:
    return tensor  # of a Triton whose launcher describes tensors itself


handle = address if DIRECT else _handle


class GroupedLauncher(MoELauncher):
    """All launches of a call by two products. Holds no tensor."""

    def __init__(self, inputs: MoEInputs, config: Config, up: Product, down: Product) -> None:
        self._early = starts_early(inputs)
        self._block_m, self._up, self._down = config["block_m"], up, down
        self._combine = combine.Combine(inputs, self._early)

    def bind(self, like: MoEInputs, shape: Shape | None = None) -> MoELaunch:
        p, on_gpu = like.problem, like.x.is_cuda
        counts, result = RowCounts.of(p, self._block_m), Outputs.of(like, shape).y
        take, allocate = workspace_allocator(on_gpu, _workspace(p, counts)), allocator(on_gpu)
        sort = rows.bind_rows(like.topk_ids, counts, self._early)
        up, down, add = self._up.bind(counts), self._down.bind(counts), self._combine.bind(p)

        def call(
            x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None,
        ) -> torch.Tensor:  # fmt: skip
            held, tables, active, products = take()  # held to the end of this call
            sort(handle(ids), tables)
            up(handle(x), handle(w1), None if gate_up_bias is None else handle(gate_up_bias), active, tables)
            down(active, handle(w2), None if down_bias is None else handle(down_bias), products, tables)
            out = allocate(*result)
            add(products, handle(weights), handle(out), tables)
            return out

        return call


def why_not_grouped(problem: MoEProblem) -> str | None:
    """Why the rows of a problem cannot be sorted, or routed before; None where they can."""
    return rows.why_no_tables(problem) or why_no_router(problem)


def workspace(problem: MoEProblem, config: Config) -> int:
    """Bytes of the tables, the rows between the products and after the second, and of what a router before them chose."""
    return workspace_bytes(_workspace(problem, RowCounts.of(problem, config["block_m"]))) + routing_bytes(problem)


def _workspace(problem: MoEProblem, counts: RowCounts) -> tuple[Part, ...]:
    dtype, pairs = _DTYPES[problem.dtype], counts.pairs
    return (counts.length, torch.int32), (pairs * problem.hidden, dtype), (pairs * problem.dim, dtype)


def launches_around(problem: MoEProblem, config: Config, *products: Launch) -> tuple[Launch, ...]:
    """All launches of a call by two products, a router's before them."""
    counts = RowCounts.of(problem, config["block_m"])
    return (*launches_of(problem), *rows.launches(counts), *products, *combine.launches(problem))
