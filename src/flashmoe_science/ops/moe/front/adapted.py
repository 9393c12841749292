"""Frozen experts with low-rank adapters (LoRA), by PyTorch's grouped products, forward and backward.

Neither W + scaling b a nor a gradient of W is formed: a projection of a row x is W x + scaling b (a x); from its gradient g
follow db = scaling g^T (a x) and da = scaling (g b)^T x. The call's own tensors, the adapters and the pre-activations are
saved.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.ops.calls import autocast, is_plain, needs_grad, without_autocast
from flashmoe_science.ops.explain import Explained, is_explaining
from flashmoe_science.ops.moe.call import Activation, Options, Tensors, checked
from flashmoe_science.ops.moe.call.adapters import ONCE, Adapters, LowRank, adapters_of, checked_adapters, parts_of, scalings_of
from flashmoe_science.ops.moe.call.backward import INPUTS, BackwardTensors, Wanted
from flashmoe_science.ops.moe.front import adapted_sm90
from flashmoe_science.ops.moe.front.backward.autograd import unviewed
from flashmoe_science.ops.moe.front.choose import with_dequantising
from flashmoe_science.ops.moe.front.kernels import FALLBACK
from flashmoe_science.ops.moe.pytorch import Rows, backward_by_rows, products, pytorch_moe, saving_moe, sums_of_products
from flashmoe_science.ops.operator import once

_COUNT = len(Tensors._fields)
_WHY = "adapters are given"


def experts_adapted(tensors: tuple[Any, ...], options: tuple[Any, ...], adapters: Any, weight_grads: Any) -> torch.Tensor:
    """``fused_moe`` with adapters. Raises as it does."""
    how = Options(*options)
    if isinstance(tensors[1], tuple | list):
        raise ValueError("adapters are given and gate_up_proj is a pair; it must be one tensor")
    if weight_grads is not None:
        raise ValueError("adapters and weight_grads are given; weights beside adapters are frozen and have no gradient")
    given = Tensors(*(autocast(tensors[:3]) or tensors[:3]), *tensors[3:])
    views, activation = checked(given, how)
    if activation.w8a8:
        raise ValueError(f"adapters are given and weight_format is {how.weight_format!r}, which quantises states; it must not")
    low = checked_adapters(adapters, views)
    decision = _decide(views, activation, how, low)
    if is_explaining():
        raise Explained(with_dequantising(decision, how.weight_format))
    parts = parts_of(low)
    if decision.kernel != FALLBACK:
        out = adapted_sm90.experts(views, activation, low)
    elif how.kernel == FALLBACK or not (is_plain(*views, *parts) and needs_grad(*views, *parts)):
        out = pytorch_moe(views, activation, low)  # whose derivatives are of any order
    else:
        out = _Adapted.apply(activation, how.recompute, scalings_of(low), *views, *parts)  # type: ignore[no-untyped-call]
    return unviewed(out, given.x.shape)


def _decide(tensors: Tensors, activation: Activation, options: Options, adapters: Adapters) -> Decision:
    """What serves a call. Raises CannotServe."""
    if options.kernel == FALLBACK:
        return Decision(FALLBACK, Config(), "asked for by name", "requested")
    if options.kernel is None:
        reason = adapted_sm90.why_not(tensors, activation, options, adapters, by_name=False)
        if reason is None:
            return Decision(adapted_sm90.NAME, Config(), _WHY, "modelled")
        return Decision(FALLBACK, Config(), f"{_WHY}, which PyTorch's grouped products serve: {reason}", "required")
    if options.kernel != adapted_sm90.NAME:
        can = f"{FALLBACK!r} and {adapted_sm90.NAME!r} can"
        raise CannotServe(f"kernel {options.kernel!r} cannot serve this call: {_WHY}; {can}")
    if (reason := adapted_sm90.why_not(tensors, activation, options, adapters)) is not None:
        raise CannotServe(f"kernel {options.kernel!r} cannot serve this call: {_WHY}, and {reason}; {FALLBACK!r} can")
    return Decision(adapted_sm90.NAME, Config(), "asked for by name", "requested")


class _Adapted(torch.autograd.Function):
    """The experts; the gradients of "w1" and "w2" are those of their adapters."""

    @staticmethod
    def forward(ctx: Any, activation: Activation, recompute: bool, scalings: tuple[float, float], *given: Any) -> torch.Tensor:
        out, z = saving_moe(Tensors(*given[:_COUNT]), activation, adapters_of(given[_COUNT:], scalings))
        ctx.call = activation, scalings
        ctx.save_for_backward(*given, None if recompute else z)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        return None, None, None, *once(partial(_backward, *ctx.call, ctx.needs_input_grad[3:]), ONCE, dout, *ctx.saved_tensors)


def _backward(
    activation: Activation, scalings: tuple[float, float], needed: tuple[bool, ...], dout: torch.Tensor, *saved: Any
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the tensors of a call and of its adapters' parts."""
    *given, z = saved
    adapters = adapters_of(given[_COUNT:], scalings)
    of_parts: list[torch.Tensor | None] = [None, None, None, None]

    def of_weights(name: str, left: torch.Tensor, right: torch.Tensor, rows: Rows) -> None:
        place = ("dw1", "dw2").index(name)
        of_parts[2 * place : 2 * place + 2] = _gradients(adapters[place], left, right, rows)

    wanted = dict(zip(Tensors._fields, needed, strict=False)) | {"w1": any(needed[_COUNT:-2]), "w2": any(needed[-2:])}
    tensors = BackwardTensors(*Tensors(*given[:_COUNT]), z, dout)
    asked = Wanted(*(wanted[name] for name in INPUTS))
    with without_autocast(dout):
        made = backward_by_rows(tensors, activation, asked, of_weights, adapters)
    like = dict(zip(Tensors._fields, given, strict=False))
    gradients = (made[f"d{name}"].to(like[name].dtype) if f"d{name}" in made else None for name in Tensors._fields)
    return *gradients, *of_parts


def _gradients(
    adapter: LowRank | None, left: torch.Tensor, right: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of a and b, where left^T right over an expert's rows would be the gradient of the weights."""
    assert adapter is not None
    a, b, scaling = adapter
    of_a = sums_of_products(products(left, b.mT, rows), right, rows, a)
    return scaling * of_a, scaling * sums_of_products(left, products(right, a, rows), rows, b)
