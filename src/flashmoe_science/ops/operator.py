"""Registers an operation's operator with PyTorch: one schema, one fake, one autograd rule; derivatives within an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashmoe_science.ops.calls import needs_grad
from flashmoe_science.ops.private import below_autograd, forward_level, without_keys

_LIBRARY = torch.library.Library("flashmoe", "FRAGMENT")


def register(
    schema: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    differentiable: Callable[..., Any] | str | None = None,
    flops: Callable[..., int] | None = None,
) -> Any:
    """Define ``flashmoe::<schema>`` and return its overload.

    torch.compile, export, fake tensors, modes and tensor subclasses see the operator; plain eager calls bypass it.

    Args:
        schema: the name and the arguments, in PyTorch's schema language.
        forward: computes on the CPU and CUDA. PyTorch leaves out trailing arguments that are their defaults.
        fake: shapes, strides and dtypes of ``forward``'s results, without the work.
        differentiable: computes by differentiable operators, for inputs that may need gradients; or the words that refuse a
            derivative when it is asked for; None for an operator without one.
        flops: of the operator's arguments, and of its results as ``out_val``, for PyTorch's FlopCounterMode.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, forward, key)
    torch.library.register_fake(f"flashmoe::{name}", fake, lib=_LIBRARY)
    packet = getattr(torch.ops.flashmoe, name)
    operator = packet.default
    if flops is not None:
        register_flop_formula(packet, get_raw=True)(flops)
    if differentiable is None:
        return operator

    if isinstance(differentiable, str):
        differentiable = partial(_Refused.apply, operator, differentiable)

    def with_autograd(keys: torch.DispatchKeySet, *args: Any) -> Any:
        if needs_grad(*(one for one in args if isinstance(one, torch.Tensor))) or forward_level._current_level >= 0:
            return differentiable(*args)
        if below_autograd is None:
            return operator.redispatch(keys.remove(torch.DispatchKey.AutogradFunctionality), *args)
        with below_autograd():
            return operator(*args)

    _LIBRARY.impl(name, with_autograd, "Autograd", with_keyset=True)
    return operator


class _Refused(torch.autograd.Function):
    """An operator whose results cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, operator: Callable[..., Any], words: str, *args: Any) -> Any:
        ctx.words = words
        return operator(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError(ctx.words)


def once(function: Callable[..., Any], words: str, *tensors: torch.Tensor | None) -> Any:
    """``function`` of the tensors in a backward; ``words`` refuse a derivative of its results when it is asked for.

    With torch.autograd.function.once_differentiable, torch.autograd.grad of a sum would silently leave the results out.
    """
    return _Refused.apply(function, words, *tensors) if torch.is_grad_enabled() else function(*tensors)  # type: ignore[no-untyped-call]


Many = Sequence[torch.Tensor]


def gradients(
    function: Callable[..., tuple[torch.Tensor, ...]], leaves: Many, into: Many
) -> tuple[Many, Sequence[torch.Tensor | None]]:
    """The results of PyTorch's operators, and the gradients of the leaves by ``into``, None if there is none. Works within our
    operators too, where PyTorch records nothing; on the caller's thread."""
    if without_keys is None:
        with torch.enable_grad():
            results, derivative, *_ = torch.func.vjp(function, *leaves)
            return results, derivative(tuple(into))
    of_autograd = torch.DispatchKey.AutogradFunctionality
    with torch.enable_grad(), without_keys(of_autograd, False), torch.autograd.set_multithreading_enabled(False):
        results = function(*[one.requires_grad_() for one in leaves])
        return results, torch.autograd.grad(results, leaves, into, allow_unused=True)
