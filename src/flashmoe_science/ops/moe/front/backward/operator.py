"""The operator ``flashmoe::moe_backward``: the gradients of one call of experts, each sum in one order.

The autograd rule of ``flashmoe::moe_forward`` (autograd.py) calls it, and a user's rule may.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.operations import kernel_named
from flashmoe_science.ops.cache import MAX_PLANS, Cache
from flashmoe_science.ops.calls import device_guard, find_launch, guards_of, store_launch, without_autocast
from flashmoe_science.ops.formats import columns_of
from flashmoe_science.ops.moe.call import Activation, dense
from flashmoe_science.ops.moe.call.backward import (
    INPUTS,
    NEW,
    BackwardBind,
    BackwardInputs,
    BackwardLaunch,
    BackwardTensors,
    Gradients,
    Sums,
    Wanted,
    backward_inputs_of,
    gradients_like,
)
from flashmoe_science.ops.moe.front.backward.choose import choose_backward
from flashmoe_science.ops.moe.front.backward.kernels import FALLBACK
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem
from flashmoe_science.ops.moe.pytorch import pre_activations, pytorch_backward
from flashmoe_science.ops.operator import register

_COUNT = len(BackwardTensors._fields)
BINDS: Cache[Hashable, BackwardBind] = Cache(MAX_PLANS)


def gradients_of(
    tensors: BackwardTensors, activation: Activation, wanted: Wanted, kernel: str | None, sums: Sums = NEW
) -> Gradients:
    """The gradients of a call whose forward was checked, without autocast; those added to tensors are these tensors."""
    if not tensors.x.shape[0]:
        return Gradients(*(None if one is None else one.zero_() for one in _empty(tensors, wanted, sums)))
    with without_autocast(tensors.x):
        return backward(tensors, activation, wanted, kernel, sums)


def backward(
    tensors: BackwardTensors, activation: Activation, wanted: Wanted, kernel: str | None, sums: Sums = NEW
) -> Gradients:
    """``gradients_of`` one token or more."""
    given = [one for one in (*tensors, *sums) if one is not None]
    absent = tuple([one is None for one in (*tensors, *sums)])
    switch = torch.are_deterministic_algorithms_enabled()
    key = (MoEBackwardProblem.op, tensors.x.shape, activation, wanted, kernel, absent, switch)
    launch: BackwardLaunch | None = find_launch(key, given)
    if launch is None:
        launch = _bound(tensors, activation, wanted, kernel, sums)
        store_launch(key, guards_of(given, aligned=True), launch)
    return launch(tensors, sums)


def _bound(tensors: BackwardTensors, activation: Activation, wanted: Wanted, kernel: str | None, sums: Sums) -> BackwardLaunch:
    """The launch of what serves such a call. Raises CannotServe: as ``choose_backward``."""
    guard, unable, launch = device_guard(tensors.x.get_device()), dict[str, str](), None
    while launch is None:
        decision = choose_backward(tensors.of_call(), activation, kernel, unable)
        if decision.kernel == FALLBACK:
            return lambda tensors, sums: pytorch_backward(tensors, activation, wanted, sums)
        inputs = backward_inputs_of(_with_z(tensors, activation), activation, wanted, sums)
        try:
            launch = guard(guard(_bind_of(decision.kernel, decision.config, inputs))(inputs))
        except CannotServe as refusal:
            unable[decision.kernel] = str(refusal)  # the next choice passes it over, or refuses with the reason

    def launch_dense(tensors: BackwardTensors, sums: Sums) -> Gradients:
        *_, z, dout = _with_z(tensors, activation)
        return launch(BackwardTensors(*dense(tensors.of_call()), z, dout), sums)

    return launch_dense


def _with_z(tensors: BackwardTensors, activation: Activation) -> BackwardTensors:
    """The tensors with the pre-activations, as kernels take them."""
    return tensors if tensors.z is not None else tensors._replace(z=pre_activations(tensors.of_call(), activation))


def _bind_of(name: str, config: Config, inputs: BackwardInputs) -> BackwardBind:
    """The kernel's ``bind`` for calls of this class, stored with what it builds."""
    p, tensors = inputs.problem, inputs.tensors
    every = *tensors, *inputs.sums
    of_tensors = tuple(None if one is None else (one.dtype, one.data_ptr() % 16) for one in every)
    strides = tuple(one.stride() for one in (tensors.x, tensors.w1, tensors.w2, tensors.dout, *inputs.sums) if one is not None)
    of_call = p.experts, p.top_k, p.dim, p.hidden, inputs.activation, inputs.wanted
    key = (name, config, of_call, of_tensors, strides, tensors.x.device)
    bind = BINDS.get(key)
    if bind is None:
        plan = kernel_named(name, p.op).plan
        assert plan is not None
        bind = BINDS[key] = plan(inputs, config)
    return bind


# The operator -----------------------------------------------------------------------------------------------------------------


def _unpacked(*args: Any) -> tuple[BackwardTensors, Activation, Wanted, str | None, Sums]:
    wanted, function, gated, interleaved, alpha, limit, *rest = args[_COUNT:]
    kernel, w8a8, *sums = (*rest, None, False)[: max(len(rest), 2)]
    activation = Activation(function, gated, interleaved, alpha, limit, w8a8)
    return BackwardTensors(*args[:_COUNT]), activation, Wanted(*wanted), kernel, Sums(*sums)


def _check(tensors: BackwardTensors) -> None:
    """Raise ValueError or TypeError unless what the forward saved, and the gradient into its result, are of such a call."""
    x = tensors.x
    pairs, rows = tensors.topk_ids.shape[0] * tensors.topk_ids.shape[1], tensors.w1.shape[1]
    for name, one, shape in (("z", tensors.z, (pairs, rows)), ("dout", tensors.dout, tuple(x.shape))):
        if one is not None and one.shape != shape:
            raise ValueError(f"{name} has shape {tuple(one.shape)}; it must be {tuple(shape)}")
        if one is not None and one.dtype != x.dtype:
            raise TypeError(f"{name} has dtype {one.dtype}; it must be {x.dtype}")


@torch.no_grad()
def _backward(*args: Any) -> tuple[torch.Tensor, ...]:
    """The operator on CPU and CUDA: what is not wanted is empty."""
    tensors, activation, wanted, kernel, sums = _unpacked(*args)
    _check(tensors)
    made = gradients_of(tensors, activation, wanted, kernel, sums)
    added = {name: None for name, one in sums._asdict().items() if one is not None}  # a result is no argument
    return _none_as_empty(tensors, made._replace(**added))


def _fake(*args: Any) -> tuple[torch.Tensor, ...]:
    """Shapes, strides and dtypes of ``_backward``'s results without the work."""
    tensors, _, wanted, _, sums = _unpacked(*args)
    _check(tensors)
    return _none_as_empty(tensors, _empty(tensors, wanted, sums))


def _empty(tensors: BackwardTensors, wanted: Wanted, sums: Sums) -> Gradients:
    new, like = tensors.x.new_empty_strided, gradients_like(tensors, wanted, sums)
    return Gradients(*(None if one is None else new(one[0], one[1], dtype=one[2]) for one in like))


def _none_as_empty(tensors: BackwardTensors, made: Gradients) -> tuple[torch.Tensor, ...]:
    return tuple(tensors.x.new_empty(0) if one is None else one for one in made)


def _flops(*args: Any, out_val: object = None) -> int:
    """FLOPs of the products that the wanted gradients need."""
    tensors, _, wanted, *_ = _unpacked(*args)
    rows, width, dim = tensors.w1.shape[1], columns_of(tensors.w2), tensors.x.shape[1]
    of_first, of_second = rows * dim, width * dim
    of_z = wanted.dx or wanted.dw1 or wanted.dgate_up_bias
    elements = of_second * (bool(of_z or wanted.dtopk_weights) + wanted.dw2) + of_first * (wanted.dx + wanted.dw1)
    return 2 * tensors.topk_ids.numel() * (elements + (of_first if tensors.z is None else 0))


_SCHEMA = (
    "(Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? gate_up_bias, Tensor? down_bias, "
    "Tensor? gate_up_scale, Tensor? down_scale, Tensor? gate_up_zero_point, Tensor? down_zero_point, "
    "Tensor? gate_up_input_scale, Tensor? down_input_scale, Tensor? z, Tensor dout, "
    "bool[6] wanted, str function, bool gated, bool interleaved, float alpha, float limit, "
    "str? kernel_name"
)
_RESULTS = ", ".join(f"Tensor d{name}" for name in INPUTS)
_ONCE = (
    "the gradients of flashmoe::moe_backward are asked for, which has none: differentiate experts once, or use "
    "kernel='grouped_mm'"
)
OPERATOR = register(f"moe_backward{_SCHEMA}=None, bool w8a8=False) -> ({_RESULTS})", _backward, _fake, _ONCE, _flops)
# The same, but it adds dW1 and dW2 to given tensors and returns empty ones for them.
_ADDING = f"moe_backward_adding{_SCHEMA}, bool w8a8, Tensor(a!)? sum_w1, Tensor(b!)? sum_w2) -> ({_RESULTS})"
ADDING = register(_ADDING, _backward, _fake, _ONCE, _flops)
