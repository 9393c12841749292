"""Tokens of all ranks as rows sorted by this rank's experts, for products that are not ours, and their results back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashmoe_science.parallel.agree import once_differentiable
from flashmoe_science.parallel.expert import Combined, Summed, dispatched
from flashmoe_science.parallel.transport import of_places, sums_of
from flashmoe_science.parallel.workspace import Combine, ExpertWorkspace


class Routing(NamedTuple):
    """``order``: [R], the choice of each row, of [N * max_tokens, K] choices. ``places``: [N * max_tokens, K], the row of each
    choice; -1: none. ``weights``, ``ids``: [T, K], of this rank. ``everyones_weights``: [N * max_tokens, K]."""

    order: torch.Tensor
    places: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    everyones_weights: torch.Tensor


def to_experts(
    workspace: ExpertWorkspace, combine: Combine, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Routing]:
    """The rows [R, H] of this rank's experts in the order of experts, ranks and tokens, and how many each expert has, int64.
    Every rank calls it. Differentiable. The host waits for R.

    Args:
        x, weights, ids: [T, H] and [T, K], of this rank; ids are those of all ranks' experts.
    """
    sent = weights if combine == "reduced" else weights.detach()
    everyones_x, everyones_weights, local = dispatched(workspace, x, sent, ids)
    experts = workspace.local_experts
    expert, order = torch.where((local >= 0) & (local < experts), local, experts).flatten().sort(stable=True)
    first = torch.searchsorted(expert, torch.arange(experts + 1, dtype=expert.dtype, device=expert.device))
    order = order[: int(first[-1])]
    places = torch.full_like(expert, -1, dtype=torch.int64)
    places[order] = torch.arange(len(order), device=order.device)
    routing = Routing(order, places.view_as(local), weights, ids, everyones_weights)
    rows: torch.Tensor = _Rows.apply(everyones_x, routing)  # type: ignore[no-untyped-call]
    return rows, first.diff(), routing


def to_tokens(workspace: ExpertWorkspace, combine: Combine, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[T, H], of each token the sum of its rows [R, H], as ``to_experts`` ordered them, times their weights. Every rank calls
    it. Differentiable.

    Raises:
        ValueError: not as many rows, or not as wide.
    """
    if (shape := (len(routing.order), workspace.hidden)) != tuple(rows.shape):
        raise ValueError(f"the experts' results have shape {tuple(rows.shape)}; it must be {shape}, as that of their rows")
    if combine == "reduced":
        partial = _Sums.apply(rows, routing.everyones_weights, routing)  # type: ignore[no-untyped-call]
        return Summed.apply(workspace, partial, len(routing.ids))  # type: ignore[no-any-return,no-untyped-call]
    pairs = _Pairs.apply(rows, routing)  # type: ignore[no-untyped-call]
    return Combined.apply(  # type: ignore[no-any-return,no-untyped-call]
        workspace, pairs, routing.weights, routing.ids, routing.everyones_weights
    )


def _sums(rows: torch.Tensor, weights: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
    return sums_of(_some(rows), weights, places)


def _some(rows: torch.Tensor) -> torch.Tensor:
    """The rows, at least one: what no place names is not read, but must be there."""
    return rows.contiguous() if len(rows) else rows.new_zeros(1, *rows.shape[1:])


class _Rows(torch.autograd.Function):
    """The row of each choice, of tokens [N * max_tokens, H]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.save_for_backward(routing.places)
        return x[routing.order // routing.places.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: torch.Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return _sums(drows, None, places), None


class _Pairs(torch.autograd.Function):
    """[N * max_tokens * K, H], rows in the order of the choices; zeros for those of others' experts."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.save_for_backward(routing.order)
        pairs = rows.new_zeros(routing.places.numel(), rows.shape[1])
        pairs[routing.order] = rows
        return pairs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dpairs: torch.Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return dpairs[order], None


class _Sums(torch.autograd.Function):
    """[N * max_tokens, H], of each token the sum of its rows here times their weights, in fp32 (fp64 of fp64)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, routing.order, routing.places)
        return _sums(rows, weights, routing.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsums: torch.Tensor) -> Any:
        rows, weights, order, places = ctx.saved_tensors
        of_rows = weights.flatten()[order][:, None] * dsums[order // places.shape[1]]
        of_weights = None
        if ctx.needs_input_grad[1]:
            of_weights = (of_places(_some(rows), places).to(weights.dtype) * dsums[:, None]).sum(-1)
        return of_rows.to(rows.dtype), of_weights, None
