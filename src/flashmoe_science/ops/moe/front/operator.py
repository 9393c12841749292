"""The operator ``flashmoe::moe_forward``, what serves its calls, and the short path that eager calls take around it.

torch.compile, export, modes and tensor subclasses see the operator. A plain eager call looks up its bound call (``plans.py``)
by a key and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.ops.moe.call.inputs import Activation, BoundMoE, Function
from flashmoe_science.ops.moe.call.spec import Options, Tensors, checked, inputs_of
from flashmoe_science.ops.moe.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.moe.front.plans import bind_call, plan_of
from flashmoe_science.ops.moe.front.pytorch import pytorch_moe
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


class Known(NamedTuple):
    """A call that was bound, and when it serves another: tensors that fit, and whose ``alignment`` is equal."""

    fits: Callable[..., bool]
    misaligned: Hashable
    call: BoundMoE


CALLS: Cache[Hashable, tuple[Known, ...]] = Cache(MOST_CALLS)
_NO_BIASES = True, True
_MOST_ALIKE = 8  # calls of one key, which differ in other tensors than hidden_states


def experts_forward(tensors: Tensors, options: Options) -> torch.Tensor:
    """``fused_moe``, whose arguments these are.

    Raises:
        TypeError, ValueError: one that is not allowed, an unknown kernel, a kernel that cannot serve the call.
    """
    if torch.compiler.is_compiling():
        return _through_operator(tensors, options)
    key, call = _known(tensors, options)
    if call is None:
        if not (is_undisturbed() and _are_plain(tensors)):
            return _through_operator(tensors, options)
        x, w1, w2, weights, _, gate_up_bias, down_bias = tensors
        call = _bound(tensors, options, key, needs_grad(x, w1, w2, weights, gate_up_bias, down_bias))
    return call(*tensors)


def _known(tensors: Tensors, options: Options) -> tuple[Hashable, BoundMoE | None]:
    """The key of a call, and what serves it, None where it was not met before or is no plain eager call."""
    hidden_states, _, _, _, _, gate_up_bias, down_bias = tensors
    without = gate_up_bias is None, down_bias is None
    given = tensors[:5] if without == _NO_BIASES else _given(tensors)
    try:
        # The types of options too: True and 1 are equal.
        key = (hidden_states.shape, options, *map(type, options), without, torch.is_grad_enabled())
        known = CALLS.get(key)
        if known is None or not could_be_known(given):
            return key, None
    except (RuntimeError, TypeError, AttributeError):  # no tensor, a nested one, an option that has no hash
        checked(tensors, options)
        raise
    for fits, misaligned, call in known:
        if fits(*given) and misaligned == alignment(given):
            return key, call
    return key, None


def _given(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """All tensors but biases that are None."""
    return tuple(one for one in tensors if one is not None)


def _are_plain(tensors: Tensors) -> bool:
    """Whether the tensors' memory is all there is to them; so too what is no tensor, which is refused later."""
    tensor = torch.Tensor
    return not any(isinstance(one, tensor) and (type(one) not in PLAIN or one.is_neg()) for one in tensors)


def _bound(tensors: Tensors, options: Options, key: Hashable, grad: bool) -> BoundMoE:
    """The call of such tensors, which is known from now on. Raises as ``experts_forward``."""
    call, given = bind_call(tensors, options, grad), _given(tensors)
    known = Known(guards_of(given), alignment(given), call)
    CALLS[key] = (known, *CALLS.get(key, ())[: _MOST_ALIKE - 1])
    return call


def decide(tensors: Tensors, options: Options) -> Decision:
    """What serves such a call, and why. Compiles the kernel; launches nothing. Raises as ``experts_forward``."""
    views = checked(tensors, options)
    if views[0].shape[0] == 0:
        raise ValueError("hidden_states has no tokens: nothing is computed")
    x, w1, w2, weights, _, _, gate_up_bias, down_bias = views
    grad = needs_grad(x, w1, w2, weights, gate_up_bias, down_bias)
    return plan_of(inputs_of(*views), options[-1], grad).decision


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def _through_operator(tensors: Tensors, options: Options) -> torch.Tensor:
    x, w1, w2, weights, ids, a, gate_up_bias, down_bias = checked(tensors, options)
    if x.shape[0] == 0:
        return torch.zeros_like(tensors[0])
    arguments = (a.function, a.gated, a.interleaved, a.alpha, a.limit, options[-1])
    out: torch.Tensor = _OPERATOR(x, w1, w2, weights, ids, gate_up_bias, down_bias, *arguments)
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
    key, call = _known(tensors, options)
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
    if not needs_grad(x, w1, w2, weights, gate_up_bias, down_bias) and forward_ad._current_level < 0:
        rest = (gate_up_bias, down_bias, function, gated, interleaved, alpha, limit, kernel_name)
        with torch._C._AutoDispatchBelowAutograd():
            return _OPERATOR(x, w1, w2, weights, ids, *rest)  # type: ignore[no-any-return]
    check_kernel_with_gradients(kernel_name, PYTORCH)
    activation = Activation(function, gated, interleaved, alpha, limit)
    return pytorch_moe(x, w1, w2, weights, ids, activation, gate_up_bias, down_bias)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("moe_forward", _forward, _key)
_LIBRARY.impl("moe_forward", _with_autograd, "Autograd")
torch.library.register_fake("flashmoe::moe_forward", _fake, lib=_LIBRARY)
_OPERATOR = torch.ops.flashmoe.moe_forward.default
