"""Experts with low-rank adapters by our kernels for Hopper, as part of PyTorch's graph.

The call's own tensors, the adapters, the pre-activations and two rows of rank width a pair are saved between the passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.calls import (
    device_guard,
    find_launch,
    guards_of,
    is_plain,
    needs_grad,
    store_launch,
    without_autocast,
)
from flashmoe_science.ops.explain import is_explaining
from flashmoe_science.ops.moe.call import DTYPES, Activation, Options, Tensors, inputs_of
from flashmoe_science.ops.moe.call.adapters import ONCE, Adapters, adapters_of, parts_of, scalings_of
from flashmoe_science.ops.moe.call.backward import BackwardTensors, Wanted, backward_inputs_of
from flashmoe_science.ops.operator import once

NAME = "moe_grouped_gluon_sm90"  # the kernel of the forward's products, by which both passes are asked for
_INPUTS = 5  # of Tensors, those that such a call has


def why_not(
    tensors: Tensors, activation: Activation, options: Options, adapters: Adapters, by_name: bool = True
) -> str | None:  # fmt: skip
    """Why these kernels do not serve a call, in words; None if they may. Unless ``by_name`` they serve only many rows."""
    if TRITON_MISSING:
        return TRITON_MISSING
    if torch.compiler.is_compiling() or not (is_plain(*tensors, *parts_of(adapters)) or is_explaining()):
        return "the call is under torch.compile or a transform, or has a tensor subclass"
    if options.recompute:
        return "recompute is True, and it keeps the pre-activations"
    if adapters == (None, None):
        return "neither adapter is given"
    if tensors.x.dtype not in DTYPES:
        return f"hidden_states has dtype {tensors.x.dtype}; it serves fp16 and bf16"
    if not tensors.x.shape[0]:
        return "hidden_states has no tokens"
    from flashmoe_science.ops.moe.adapted.forward import why_not_memory
    from flashmoe_science.ops.moe.products.gluon_sm90.config import MIN_ROWS, supports

    inputs = inputs_of(tensors, activation)
    if not by_name and (rows := inputs.problem.rows_per_expert()) < MIN_ROWS:
        return f"an expert has {rows:.1f} rows on average; it is a good guess from {MIN_ROWS}"
    return supports(inputs.problem, gpu_of(tensors.x)) or why_not_memory(inputs, adapters)


def experts(tensors: Tensors, activation: Activation, adapters: Adapters) -> torch.Tensor:
    """The experts of a call that ``why_not`` allows."""
    parts = parts_of(adapters)
    if not needs_grad(*tensors, *parts):
        out: torch.Tensor = _forward(tensors, activation, adapters, saves_z=False)[0]
        return out
    return _Adapted.apply(activation, scalings_of(adapters), *tensors[:_INPUTS], *parts)  # type: ignore[no-any-return,no-untyped-call]


class _Adapted(torch.autograd.Function):
    """The experts, whose weights have no gradient."""

    @staticmethod
    def forward(ctx: Any, activation: Activation, scalings: tuple[float, float], *given: Any) -> torch.Tensor:
        adapters = adapters_of(given[_INPUTS:], scalings)
        out, *saved = _forward(Tensors(*given[:_INPUTS]), activation, adapters, saves_z=True)
        ctx.call = activation, scalings
        ctx.save_for_backward(*given, *saved)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        activation, scalings = ctx.call
        _, _, of_x, _, _, of_weights, *_ = ctx.needs_input_grad
        wanted = Wanted(dx=of_x, dw1=False, dw2=False, dtopk_weights=of_weights)

        def gradients(dout: torch.Tensor, *saved: Any) -> Any:
            *given, z, u1, u2 = saved
            tensors, adapters = BackwardTensors(*Tensors(*given[:_INPUTS]), z, dout), adapters_of(given[_INPUTS:], scalings)
            with without_autocast(dout):
                return _backward(tensors, activation, adapters, (u1, u2), wanted)

        dx, dweights, *made = once(gradients, ONCE, dout, *ctx.saved_tensors)
        return None, None, dx, None, None, dweights, None, *made


def _forward(tensors: Tensors, activation: Activation, adapters: Adapters, saves_z: bool) -> Any:
    def bind() -> Any:
        from flashmoe_science.ops.moe.adapted.forward import plan
        from flashmoe_science.ops.moe.products.gluon_sm90.config import configs

        inputs = inputs_of(tensors, activation, saves_z)
        return plan(inputs, adapters, configs(inputs.problem, gpu_of(tensors.x))[0])(inputs)

    launch = _launch("moe, adapted", (activation, saves_z), tensors, adapters, (), bind)
    return launch(inputs_of(tensors, activation).tensors, adapters)


def _backward(tensors: BackwardTensors, activation: Activation, adapters: Adapters, saved: Any, wanted: Wanted) -> Any:
    def bind() -> Any:
        from flashmoe_science.ops.moe.adapted.backward import plan
        from flashmoe_science.ops.moe.backward.gluon_sm90.config import configs

        inputs = backward_inputs_of(tensors, activation, wanted)
        return plan(inputs, adapters, configs(inputs.problem, gpu_of(tensors.x))[0])(inputs)

    launch = _launch("moe, adapted backward", (activation, wanted), tensors, adapters, saved, bind)
    return launch(backward_inputs_of(tensors, activation, wanted).tensors, adapters, saved)


def _launch(name: str, options: tuple[Any, ...], tensors: Any, adapters: Adapters, saved: Any, bind: Callable[[], Any]) -> Any:
    """The stored launch for calls like this one, or the one that ``bind`` makes."""
    parts = parts_of(adapters)
    given = [one for one in (*tensors, *parts, *saved) if one is not None]
    key = (name, tensors.x.shape, *options, *(one is None for one in parts))
    launch = find_launch(key, given)
    if launch is None:
        guard = device_guard(tensors.x.get_device())
        launch = guard(guard(bind)())  # a launch may compile when it is bound
        store_launch(key, guards_of(given, aligned=True), launch)
    return launch
