"""A mixture of experts that are spread over ranks; each rank has its own tokens.

Every rank receives the ids of all ranks' choices and sorts them as usual: no counts are exchanged, and nothing waits for the
host. If a rank has fewer tokens than ``max_tokens``, the other places have ids of no expert and cost only their bytes.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import islice
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from flashmoe_science.moe import fused_moe
from flashmoe_science.ops.calls import autocast
from flashmoe_science.ops.explain import Explained, is_explaining
from flashmoe_science.ops.moe.call import Options, Rows, Tensors, checked
from flashmoe_science.ops.moe.call.pair import Pair, checked_pair, joined
from flashmoe_science.ops.moe.front.backward.autograd import unviewed
from flashmoe_science.ops.moe.front.operator import experts_rows
from flashmoe_science.parallel.agree import agreed, compares, once_differentiable
from flashmoe_science.parallel.transport import of_places, sums_of
from flashmoe_science.parallel.workspace import Combine, ExpertWorkspace

_SIGNATURE = inspect.signature(fused_moe)
_OPTIONAL = Tensors._fields[5:]  # biases and scales
Given = tuple[torch.Tensor, ...]
Gathered = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # hidden, weights and ids of all ranks


def expert_parallel_moe(
    hidden: torch.Tensor,
    gate_up_local: torch.Tensor | Pair,
    down_local: torch.Tensor,
    top_k_weights: torch.Tensor,
    top_k_ids: torch.Tensor,
    *,
    workspace: ExpertWorkspace,
    combine: Combine = "exact",
    **options: Any,
) -> torch.Tensor:
    """``fused_moe`` of this rank's tokens by the experts of all ranks. Every rank of the group must call it, even without
    tokens.

    Differentiable; equal calls give equal bits, in the gradients too. A weight's gradient covers all ranks' tokens; every rank
    must run the backward. torch.compile cannot trace the call: put it in a function under torch.compiler.disable.

    Args:
        hidden: [..., H], at most ``max_tokens`` tokens, in the workspace's dtype.
        gate_up_local, down_local: this rank's experts, laid out as ``fused_moe`` takes them: tensors, or DTensors that are
            Shard(0) over the workspace's group. ``gate_up_local`` may be a pair.
        top_k_weights, top_k_ids: [..., K]; ids name all ranks' experts, from 0 to E - 1. Others add nothing.
        workspace: of the layer's sizes.
        combine: "exact": the row of each choice is sent, and the token's rank sums the rows in the order of the choices, as in
            one process, for any number of ranks. "reduced": each rank sums its own rows of a token, and the sums are added in
            fp32, in the order of the ranks: K times fewer bytes come back.
        options: those of ``fused_moe`` except ``adapters``, the same on every rank; biases and scales are this rank's.

    Returns:
        [..., H] in the dtype of ``hidden``.

    Raises:
        TypeError, ValueError: an argument that is not allowed. On the CPU, and with FLASHMOE_CHECK=1 in the environment, each
            call compares the arguments of all ranks, and all raise; else a rank may raise alone, and the others wait until the
            group's time limit.
    """
    given = (hidden, gate_up_local, down_local, top_k_weights, top_k_ids)
    tensors, options = _agreed(given, workspace, combine, options)
    (x, _, _, weights, ids), experts = tensors, tensors[1:3]
    shape, (x, weights, ids) = x.shape, (one.reshape(-1, one.shape[-1]) for one in (x, weights, ids))
    try:
        out = _by_all_ranks(workspace, combine, x, experts, weights, ids, options)
    except Explained as found:
        words = f"{found.decision.reason}; tokens and results go by {workspace.transport}: {workspace.cost(combine)}"
        raise Explained(replace(found.decision, reason=words)) from None
    return unviewed(out, shape)


def _by_all_ranks(
    workspace: ExpertWorkspace, combine: Combine, x: torch.Tensor, experts: Given, weights: torch.Tensor, ids: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """[T, H] of this rank's tokens."""
    reduced = combine == "reduced"
    gathered = dispatched(workspace, x, weights if reduced else weights.detach(), ids)
    if (rows := _rows(workspace, gathered, experts, options)) is not None:
        return workspace.transport.sent(rows, gathered[1] if reduced else None, weights, ids)
    if reduced:
        (everyones_x, everyones_weights, local_ids), (gate_up, down) = gathered, experts
        partial = fused_moe(everyones_x, gate_up, down, everyones_weights, local_ids, **options)
        return Summed.apply(workspace, partial, len(x))  # type: ignore[no-any-return,no-untyped-call]
    pairs = _pairs(workspace, gathered, experts, options)
    return Combined.apply(workspace, pairs, weights, ids, gathered[1])  # type: ignore[no-any-return,no-untyped-call]


def dispatched(workspace: ExpertWorkspace, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Gathered:
    """What ``Transport.dispatch`` returns, as part of PyTorch's graph where there is one. Explaining sends nothing."""
    if is_explaining():
        of_all = workspace.ranks * workspace.max_tokens
        return x.new_empty(of_all, x.shape[1]), weights.new_empty(of_all, weights.shape[1]), ids.new_zeros(of_all, ids.shape[1])
    if torch.is_grad_enabled():
        return _Gather.apply(workspace, x, weights, ids)  # type: ignore[no-any-return,no-untyped-call]
    return workspace.transport.dispatch(x, weights, ids, kept=False)


def _rows(workspace: ExpertWorkspace, gathered: Gathered, experts: Given, options: dict[str, Any]) -> Rows | None:
    """The rows of all tokens by this rank's experts; None if they cannot go straight to their tokens' ranks."""
    if torch.is_grad_enabled() or not workspace.transport.sends:
        return None
    rest, (gate_up, down) = (options[name] for name in _OPTIONAL), experts
    one = gate_up if isinstance(gate_up, torch.Tensor) else joined(*gate_up)
    return experts_rows((gathered[0], one, down, *gathered[1:], *rest), tuple(options[name] for name in Options._fields))


def _pairs(workspace: ExpertWorkspace, gathered: Gathered, experts: Given, options: dict[str, Any]) -> torch.Tensor:
    """The rows [N * max_tokens * K, H] of all tokens, in the order of their choices: each choice is a token here, so its row is
    not summed."""
    (everyones_x, _, ids), (gate_up, down) = gathered, experts
    one = torch.ones((ids.numel(), 1), dtype=torch.float32, device=ids.device)
    return fused_moe(everyones_x.repeat_interleave(workspace.top_k, 0), gate_up, down, one, ids.view(-1, 1), **options)


# The arguments ---------------------------------------------------------------------------------------------------------------


def _agreed(
    given: tuple[Any, ...], workspace: ExpertWorkspace, combine: str, options: dict[str, Any]
) -> tuple[Given, dict[str, Any]]:
    """The tensors of this rank's ``fused_moe``, and its other arguments by name. On the CPU and with FLASHMOE_CHECK=1 ranks
    compare theirs."""
    if not isinstance(workspace, ExpertWorkspace):
        raise TypeError(f"workspace is {workspace!r}; it must be an ExpertWorkspace")
    compare = compares(given[0])
    with agreed(workspace.group, compare) as facts:
        bound = _SIGNATURE.bind(*given, **options)
        bound.apply_defaults()
        arguments: dict[str, Any] = {name: _local(name, one, workspace) for name, one in bound.arguments.items()}
        x, gate_up, *others = tuple(arguments.values())[: len(given)]
        pair = isinstance(gate_up, tuple)
        cast = (x, others[0], *gate_up) if pair else (x, others[0], gate_up)
        x, others[0], *parts = autocast(cast) or cast
        whole = _whole(parts, others[0], arguments) if pair else parts[0]
        _check_call((x, whole, *others), arguments, workspace, combine)
        facts |= _facts((x, whole, *others), arguments, combine) if compare else {}
        facts["max_tokens of the workspace"] = workspace.max_tokens
        tensors = (x, tuple(parts) if pair else whole, *others)
    return tensors, dict(islice(arguments.items(), len(given), None))


def _whole(pair: Any, down: object, arguments: dict[str, Any]) -> torch.Tensor:
    """A pair of gates and ups as one tensor of their shape, dtype and device, for checks alone."""
    gate, _ = checked_pair(pair, down, arguments["transposed"], arguments["interleaved"])
    for name, plain in (("transposed", False), ("weight_format", None)):
        if arguments[name] != plain:
            raise ValueError(f"gate_up_local is a pair and {name} is {arguments[name]!r}; it must be {plain}")
    return gate[:, :1].expand(-1, 2 * gate.shape[1], -1)


def _local(name: str, one: object, workspace: ExpertWorkspace) -> Any:
    """This rank's part of a DTensor, also in a pair; anything else as it is."""
    if isinstance(one, tuple | list):
        return tuple(_local(name, each, workspace) for each in one)
    if not isinstance(one, DTensor):
        return one
    ranks = dist.get_process_group_ranks(workspace.group)
    if tuple(one.placements) != (Shard(0),) or dist.get_process_group_ranks(one.device_mesh.get_group()) != ranks:
        raise ValueError(
            f"{name} is a DTensor of {one.placements} over {one.device_mesh}; it must be Shard(0) over ranks {ranks}"
        )
    return one.to_local()


def _check_call(tensors: tuple[Any, ...], arguments: dict[str, Any], workspace: ExpertWorkspace, combine: str) -> None:
    """Raise what ``fused_moe`` would, and if the call does not fit the workspace."""
    if combine not in get_args(Combine):
        raise ValueError(f"combine is {combine!r}; it must be one of {', '.join(get_args(Combine))}")
    if arguments["adapters"] is not None:
        raise ValueError("adapters is given; experts on several ranks take none")
    whole = *tensors, *(arguments[name] for name in _OPTIONAL)
    checked(Tensors(*whole), Options(*(arguments[name] for name in Options._fields)))
    x, gate_up, _, _, ids = tensors
    if (tokens := ids.numel() // ids.shape[-1]) > workspace.max_tokens:
        raise ValueError(f"hidden has {tokens} tokens; the workspace is for at most {workspace.max_tokens} a rank")
    for name, here, wanted in (
        ("the width of hidden", x.shape[-1], workspace.hidden),
        ("the dtype of hidden", x.dtype, workspace.dtype),
        ("top_k", ids.shape[-1], workspace.top_k),
        ("the number of gate_up_local's experts", gate_up.shape[0], workspace.local_experts),
    ):
        if here != wanted:
            raise ValueError(f"{name} is {here}; of the workspace it is {wanted}")


def _facts(tensors: tuple[torch.Tensor, ...], arguments: dict[str, Any], combine: str) -> dict[str, object]:
    """What must be the same on every rank, by name: else messages do not fit, or ranks compute different things."""
    facts: dict[str, object] = {"combine": combine, "torch.is_grad_enabled()": torch.is_grad_enabled()}
    names = ("hidden", "gate_up_local", "down_local", "top_k_weights")
    facts |= {f"{name}.requires_grad": one.requires_grad for name, one in zip(names, tensors, strict=False)}
    facts |= {f"the shape of {name}": tuple(one.shape) for name, one in zip(names[1:3], tensors[1:3], strict=True)}
    facts |= {f"{name} is None": arguments[name] is None for name in _OPTIONAL}
    facts |= {f"{name}.requires_grad": one.requires_grad for name in _OPTIONAL if (one := arguments[name]) is not None}
    return facts | {name: arguments[name] for name in Options._fields}


# What travels ----------------------------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """hidden [N * max_tokens, H] of all ranks, their weights and their ids [N * max_tokens, K], which count from this rank's
    first expert. Gradients go back to their rank and are added up there, in fp32 and in the order of the ranks."""

    @staticmethod
    def forward(
        ctx: Any, workspace: ExpertWorkspace, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.workspace, ctx.tokens, ctx.dtype = workspace, x.shape[0], weights.dtype
        everyones_x, everyones_weights, local_ids = workspace.transport.dispatch(x, weights, ids, kept=True)
        _, needs_x, needs_weights, _ = ctx.needs_input_grad
        wanted = ((everyones_x, needs_x), (everyones_weights, needs_weights), (local_ids, False))
        ctx.mark_non_differentiable(*(one for one, needed in wanted if not needed))
        return everyones_x, everyones_weights, local_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: torch.Tensor, dweights: torch.Tensor, _: object) -> Any:
        _, needs_x, needs_weights, _ = ctx.needs_input_grad

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            return ctx.workspace.transport.summed(gradient.contiguous(), ctx.tokens)  # type: ignore[no-any-return]

        of_x = summed(dx) if needs_x else None
        return None, of_x, summed(dweights).to(ctx.dtype) if needs_weights else None, None


class Summed(torch.autograd.Function):
    """[T, H], the sums of the ranks' rows [N * max_tokens, H], in fp32 (fp64 of fp64) and in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, workspace: ExpertWorkspace, partial: torch.Tensor, tokens: int) -> torch.Tensor:
        ctx.workspace = workspace
        return workspace.transport.summed(partial.contiguous(), tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        return None, ctx.workspace.transport.gather(dout), None


class Combined(torch.autograd.Function):
    """[T, H] from the rows [N * max_tokens * K, H] of all ranks' choices; this rank has its experts' rows. Each row goes to its
    token's rank, which sums them as the last launch of ``fused_moe`` does. The gradient of the sum goes back."""

    @staticmethod
    def forward(
        ctx: Any, workspace: ExpertWorkspace, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
        everyones_weights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        place = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        from_rank = ids // workspace.local_experts * (workspace.max_tokens * workspace.top_k)
        here = (ids >= 0) & (ids < workspace.experts)
        row_of_pair = torch.where(here, place + from_rank, -1)
        ctx.workspace, ctx.dtypes = workspace, (rows.dtype, weights.dtype)
        received = workspace.transport.exchange(rows.contiguous())
        out = sums_of(received, weights, row_of_pair)
        of_pairs = of_places(received, row_of_pair) if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(of_pairs, everyones_weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        of_pairs, everyones_weights = ctx.saved_tensors
        of_rows, of_weights = ctx.dtypes
        drows = dweights = None
        if ctx.needs_input_grad[1]:
            everyones = ctx.workspace.transport.gather(dout)
            drows = (everyones_weights[:, :, None] * everyones[:, None]).to(of_rows).flatten(0, 1)
        if of_pairs is not None:
            dweights = (of_pairs.to(everyones_weights.dtype) * dout[:, None]).sum(-1).to(of_weights)
        return None, drows, dweights, None, None
