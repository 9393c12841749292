"""The router's autograd rule, and ``flashmoe::moe_route_backward``: gradients of the chosen experts' weights, in fp32.

The logits and the ids are kept between the passes, for a router with losses also the experts' load. Neither the choice nor the
selection bias has a gradient. On CUDA one launch (``backward_triton.py``), else PyTorch's operators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashmoe_science.ops.calls import find_launch, guards_of, is_plain, store_launch
from flashmoe_science.ops.moe.route.choose import backward_kernels, why_pytorch
from flashmoe_science.ops.moe.route.losses import balance_loss, z_loss
from flashmoe_science.ops.moe.route.spec import Options, RouteGradient
from flashmoe_science.ops.operator import gradients, register


def differentiable(operator: str, logits: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> tuple[torch.Tensor, ...]:
    """``flashmoe::moe_route`` or ``flashmoe::moe_route_with_losses`` as a part of PyTorch's graph."""
    overload = getattr(torch.ops.flashmoe, operator).default
    return launched(lambda logits, bias: overload(logits, bias, *options), options, logits, bias)


def launched(
    forward: Callable[..., tuple[torch.Tensor, ...]], options: tuple[Any, ...], logits: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """``forward`` of the logits and the bias as a part of PyTorch's graph: the operator of a router, or its launch."""
    results: tuple[torch.Tensor, ...] = _Router.apply(forward, options, logits, bias)  # type: ignore[no-untyped-call]
    return results


def weights_of(logits: torch.Tensor, ids: torch.Tensor, options: Options) -> torch.Tensor:
    """The chosen experts' weights. The softmax over all experts, renormalised, is that over the chosen."""
    if options.scoring == "softmax" and options.normalize == "none":
        return torch.softmax(logits, -1).gather(-1, ids) * options.scaling_factor
    chosen = logits.gather(-1, ids)
    if options.scoring != "sigmoid":
        return torch.softmax(chosen, -1) * options.scaling_factor
    scores = torch.sigmoid(chosen)
    if options.normalize == "sum":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores * options.scaling_factor


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Any, options: tuple[Any, ...], logits: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        results = forward(logits, bias)
        _, ids, *losses = results
        load = losses[2:]
        ctx.options = options
        ctx.save_for_backward(logits, ids, *load)
        ctx.mark_non_differentiable(ids, *load)
        return results  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dweights: torch.Tensor, dids: object, *dlosses: torch.Tensor) -> Any:
        logits, ids, *load = ctx.saved_tensors
        plain = not torch.is_grad_enabled() and is_plain(dweights, logits)
        gradient = _gradient if plain else OPERATOR
        return None, None, gradient(dweights, logits, ids, *ctx.options, *dlosses[:2], *load), None


def _gradient(dweights: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The operator's result, where no gradient of it is asked for."""
    count = len(Options._fields)
    options, given = rest[:count], (logits, ids, dweights, *rest[count:])
    key = ("route backward", logits.shape, options, len(given))
    launch: RouteGradient | None = find_launch(key, given)
    if launch is None:
        checked = Options(*options)
        if why_pytorch(logits, checked) is None:
            launch = backward_kernels().bind(checked, *given)
        else:
            launch = partial(_by_pytorch, checked)
        store_launch(key, guards_of(given, aligned=True), launch)
    return launch(*given)


def _by_pytorch(
    options: Options, logits: torch.Tensor, ids: torch.Tensor, dweights: torch.Tensor, *of_losses: torch.Tensor
) -> torch.Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)

    def forward(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = weights_of(logits, ids.long(), options)
        return (weights, balance_loss(logits, ids), z_loss(logits)) if of_losses else (weights,)

    _, (found,) = gradients(forward, [logits.detach().to(wide)], [one.to(wide) for one in (dweights, *of_losses[:2])])
    assert found is not None
    return found.to(logits.dtype).contiguous()


def _fake(dweights: torch.Tensor, logits: torch.Tensor, *rest: object) -> torch.Tensor:
    return logits.new_empty(logits.shape)


OPERATOR = register(
    "moe_route_backward(Tensor dweights, Tensor router_logits, Tensor top_k_ids, int top_k, str scoring, str normalize, "
    "int groups, int top_k_groups, float scaling_factor, Tensor? dbalance=None, Tensor? dz=None, Tensor? load=None) -> Tensor",
    torch.no_grad()(_gradient),
    _fake,
    "the gradients of flashmoe::moe_route_backward are asked for, which has none: differentiate a router once",
)
