"""The operator ``flashmoe::moe_forward``, what serves its calls, and the launch cache that eager calls find theirs in.

torch.compile, export, modes and tensor subclasses see the operator. A plain eager call looks up its bound call (``plans.py``)
by a key and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.ops.moe.call import Activation, BoundMoE, Options, Tensors, checked, inputs_of
from flashmoe_science.ops.moe.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.moe.front.plans import bind_call, plan_of
from flashmoe_science.ops.moe.problem import Function
from flashmoe_science.ops.moe.pytorch import pytorch_moe
from flashmoe_science.ops.plan import (
    MOST_CALLS,
    PLAIN,
    Cache,
    alignment,
    check_kernel_with_gradients,
    could_be_known,
    guards_of,
    is_undisturbed,
)

Given = tuple[Any, ...]  # the fields of Tensors or of Options: a cached call makes no NamedTuple of them


class CachedLaunch(NamedTuple):
    """A bound call, and when it serves another: tensors that match, and whose ``alignment`` is equal."""

    matches: Callable[..., bool]
    alignment: Hashable
    call: BoundMoE


CALLS: Cache[Hashable, tuple[CachedLaunch, ...]] = Cache(MOST_CALLS)
_NO_BIASES = True, True
_MAX_VARIANTS = 8  # calls of one key, which differ in other tensors than hidden_states


def experts_forward(tensors: Given, options: Given) -> torch.Tensor:
    """``fused_moe``, whose arguments these are.

    Raises:
        TypeError, ValueError: one that is not allowed, an unknown kernel, a kernel that cannot serve the call.
    """
    if torch.compiler.is_compiling():
        return _through_operator(tensors, options)
    key, call = _cached(tensors, options)
    if call is None:
        if not (is_undisturbed() and _are_plain(tensors)):
            return _through_operator(tensors, options)
        call = _bound(tensors, options, key, needs_grad(Tensors(*tensors)))
    return call(*tensors)


def _cached(tensors: Given, options: Given) -> tuple[Hashable, BoundMoE | None]:
    """The key of a call, and what serves it, None where it is new or is no plain eager call."""
    hidden_states, _, _, _, _, gate_up_bias, down_bias = tensors
    without = gate_up_bias is None, down_bias is None
    present = tensors[:5] if without == _NO_BIASES else _present(tensors)
    try:
        # The types of options too: True and 1 are equal.
        key = (hidden_states.shape, options, *map(type, options), without, torch.is_grad_enabled())
        cached = CALLS.get(key)
        if cached is None or not could_be_known(present):
            return key, None
    except (RuntimeError, TypeError, AttributeError):  # no tensor, a nested one, an option that has no hash
        checked(Tensors(*tensors), Options(*options))
        raise
    for matches, aligned, call in cached:
        if matches(*present) and aligned == alignment(present):
            return key, call
    return key, None


def _present(tensors: Given) -> Given:
    """All tensors but biases that are None."""
    return tuple(one for one in tensors if one is not None)


def _are_plain(tensors: Given) -> bool:
    """Whether the tensors' memory is all there is to them; so too what is no tensor, which is refused later."""
    tensor = torch.Tensor
    return not any(isinstance(one, tensor) and (type(one) not in PLAIN or one.is_neg()) for one in tensors)


def _bound(tensors: Given, options: Given, key: Hashable, grad: bool) -> BoundMoE:
    """The call of such tensors, which is cached from now on. Raises as ``experts_forward``."""
    call, present = bind_call(Tensors(*tensors), Options(*options), grad), _present(tensors)
    cached = CachedLaunch(guards_of(present), alignment(present), call)
    CALLS[key] = (cached, *CALLS.get(key, ())[: _MAX_VARIANTS - 1])
    return call


def decide(tensors: Given, options: Given) -> Decision:
    """What serves such a call, and why. Compiles the kernel; launches nothing. Raises as ``experts_forward``."""
    views, activation = checked(Tensors(*tensors), Options(*options))
    if views.x.shape[0] == 0:
        raise ValueError("hidden_states has no tokens: nothing is computed")
    return plan_of(inputs_of(views, activation), Options(*options).kernel, needs_grad(views)).decision


def needs_grad(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def _through_operator(tensors: Given, options: Given) -> torch.Tensor:
    views, a = checked(Tensors(*tensors), Options(*options))
    if views.x.shape[0] == 0:
        return torch.zeros_like(tensors[0])
    out: torch.Tensor = _OPERATOR(*views, a.function, a.gated, a.interleaved, a.alpha, a.limit, Options(*options).kernel)
    return out.view(tensors[0].shape)


# The operator ----------------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("flashmoe", "FRAGMENT")
_LIBRARY.define(
    "moe_forward(Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? gate_up_bias, "
    "Tensor? down_bias, str function, bool gated, bool interleaved, float alpha, float limit, str? kernel_name=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _forward(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    function: Function,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
    kernel_name: str | None = None,
) -> torch.Tensor:
    """The operator on CPU and CUDA."""
    tensors = (x, w1, w2, weights, ids, gate_up_bias, down_bias)
    options = (function, False, interleaved, alpha, limit, kernel_name)
    key, call = _cached(tensors, options)
    return (call or _bound(tensors, options, key, grad=False))(*tensors)


def _fake(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def _with_autograd(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    function: Function,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
    kernel_name: str | None = None,
) -> torch.Tensor:
    """The operator where autograd is at work: PyTorch's operators, which have derivatives, if one may be asked for."""
    tensors = Tensors(x, w1, w2, weights, ids, gate_up_bias, down_bias)
    if not needs_grad(tensors) and forward_ad._current_level < 0:
        with torch._C._AutoDispatchBelowAutograd():
            return _OPERATOR(*tensors, function, gated, interleaved, alpha, limit, kernel_name)  # type: ignore[no-any-return]
    check_kernel_with_gradients(kernel_name, PYTORCH)
    return pytorch_moe(tensors, Activation(function, gated, interleaved, alpha, limit))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("moe_forward", _forward, _key)
_LIBRARY.impl("moe_forward", _with_autograd, "Autograd")
torch.library.register_fake("flashmoe::moe_forward", _fake, lib=_LIBRARY)
_OPERATOR = torch.ops.flashmoe.moe_forward.default
