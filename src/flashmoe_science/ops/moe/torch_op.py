"""The operator ``flashmoe::moe_forward``, what serves its calls, and the short path that eager calls take around it.

torch.compile, export, modes and tensor subclasses see the operator. A plain eager call looks up its bound call (``plans.py``)
by a key and launches.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.autograd import forward_ad

from flashmoe_science.dispatch.select import Decision
from flashmoe_science.ops.moe.fallback import pytorch_moe
from flashmoe_science.ops.moe.inputs import Activation, BoundMoE, Function
from flashmoe_science.ops.moe.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.moe.plans import bind_call, plan_of
from flashmoe_science.ops.moe.spec import Options, Tensors, checked, inputs_of
from flashmoe_science.ops.plan import MOST_CALLS, PLAIN, Cache, check_kernel_with_gradients, is_plain

CALLS: Cache[Hashable, BoundMoE] = Cache(MOST_CALLS)


def experts_forward(tensors: Tensors, options: Options) -> torch.Tensor:
    """``fused_moe``, whose arguments these are.

    Raises:
        TypeError, ValueError: one that is not allowed, an unknown kernel, a kernel that cannot serve the call.
    """
    if torch.compiler.is_compiling():
        return _through_operator(tensors, options)
    hidden_states, w1, w2, weights, ids, gate_up_bias, down_bias = tensors
    if not (is_plain(hidden_states, w1, w2) and _are_plain_too(weights, ids)):
        return _through_operator(tensors, options)
    grad = torch.is_grad_enabled() and needs_grad(hidden_states, w1, w2, weights, gate_up_bias, down_bias)
    return _run(tensors, options, grad)


def _are_plain_too(weights: torch.Tensor, ids: torch.Tensor) -> bool:
    """``is_plain``, where no mode or transform has a part in the call."""
    return type(weights) in PLAIN and type(ids) in PLAIN and not (weights.is_neg() or ids.is_neg())


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


def _run(tensors: Tensors, options: Options, grad: bool) -> torch.Tensor:
    """Serve the call: bound before, or checked and bound now."""
    x, w1, w2, weights, ids, gate_up_bias, down_bias = tensors
    try:
        # All that decides a launch; kernels are specialised on 16-byte alignment. Of some options the types too: True and 1 are
        # equal.
        addresses = x.data_ptr(), w1.data_ptr(), w2.data_ptr(), weights.data_ptr(), ids.data_ptr()
        _, transposed, interleaved, alpha, limit, _ = options
        key = (
            x.shape, w1.shape, w2.shape, weights.shape, ids.shape,
            x.stride(), w1.stride(), w2.stride(), weights.stride(), ids.stride(),
            x.dtype, w1.dtype, w2.dtype, weights.dtype, ids.dtype, x.device, w1.device, w2.device, weights.device, ids.device,
            tuple([one & 15 for one in addresses]),
            options, type(transposed), type(interleaved), type(alpha), type(limit), grad,
            gate_up_bias is None or _bias_key(gate_up_bias), down_bias is None or _bias_key(down_bias),
        )  # fmt: skip
        call = CALLS.get(key)
    except (RuntimeError, TypeError, AttributeError):  # a sparse tensor has no strides, an option perhaps no hash
        checked(tensors, options)
        raise
    if call is None:
        call = CALLS[key] = bind_call(tensors, options, grad)
    return call(x, w1, w2, weights, ids, gate_up_bias, down_bias)


def _bias_key(bias: torch.Tensor) -> Hashable:
    return bias.shape, bias.stride(), bias.dtype, bias.device, bias.data_ptr() & 15


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
    return _run(tensors, (function, False, interleaved, alpha, limit, kernel_name), grad=False)


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
