"""The operator ``flashmoe::moe_forward``, what serves its calls, and the short path that eager calls take around it.

A call is served by a plan: a Decision and, for a kernel, its launcher, which serves any number of tokens. Plans are found by
all that a kernel is specialised on, and by the class of the number of tokens, on which the choice rests. They hold no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from flashmoe_science.dispatch.select import Decision, select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.operations import TRITON_MISSING, kernel_named
from flashmoe_science.ops.moe.fallback import pytorch_moe
from flashmoe_science.ops.moe.inputs import SWIGLU, Activation, Function, MoEInputs, MoEKernel
from flashmoe_science.ops.moe.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.moe.kernels import ours
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.spec import inputs_of
from flashmoe_science.ops.plan import (
    MOST_PLANS,
    NO_BACKWARD,
    Cache,
    check_kernel_with_gradients,
    device_guard,
    is_plain,
    with_launch_path,
)
from flashmoe_science.problem import rounded_up


class Plan(NamedTuple):
    """What serves calls of one kind, and why."""

    decision: Decision
    call: Callable[[MoEInputs], torch.Tensor]


PLANS: Cache[Hashable, Plan] = Cache(MOST_PLANS)


def experts_forward(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: Activation,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    kernel: str | None,
) -> torch.Tensor:
    """The experts of checked tensors: x [T, H], weights and ids [T, K], w1 and w2 as ``MoEInputs`` has them.

    Raises:
        ValueError: an unknown kernel.
        CannotServe: ``kernel`` cannot serve the call.
    """
    if torch.compiler.is_compiling() or not (is_plain(x, w1, w2) and is_plain(weights, ids, ids)):
        a = activation
        return _OPERATOR(  # type: ignore[no-any-return]
            x, w1, w2, weights, ids, gate_up_bias, down_bias, a.function, a.gated, a.interleaved, a.alpha, a.limit, kernel
        )
    inputs = inputs_of(x, w1, w2, weights, ids, activation, gate_up_bias, down_bias)
    return _plan(inputs, kernel, needs_grad(x, w1, w2, weights, gate_up_bias, down_bias)).call(inputs)


def decide(inputs: MoEInputs, kernel: str | None, grad: bool) -> Decision:
    """What serves such a call, and why. Compiles the kernel; launches nothing. Raises as ``experts_forward``."""
    return _plan(inputs, kernel, grad).decision


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def _plan(inputs: MoEInputs, kernel: str | None, grad: bool) -> Plan:
    p, x = inputs.problem, inputs.x
    tensors = (x, inputs.w1, inputs.w2, inputs.topk_weights, inputs.topk_ids, inputs.gate_up_bias, inputs.down_bias)
    key = (
        p.tokens if p in _measured() else rounded_up(p.tokens), p.experts, p.top_k, p.dim, p.hidden, x.device,
        x.stride(), inputs.w1.stride(), inputs.w2.stride(), inputs.activation, kernel, grad,
        tuple(None if one is None else (one.dtype, one.data_ptr() % 16) for one in tensors),
    )  # fmt: skip
    plan = PLANS.get(key)
    if plan is None:
        plan = PLANS[key] = _make_plan(inputs, kernel, grad)
    return plan


@cache
def _measured() -> frozenset[MoEProblem]:
    """Problems of the dispatch table: each is a class of its own, for which its own record decides."""
    return frozenset(one.problem for one in committed_table().entries if isinstance(one.problem, MoEProblem))


def _make_plan(inputs: MoEInputs, name: str | None, grad: bool) -> Plan:
    requested: MoEKernel | None = None if name is None else kernel_named(name, MoEProblem.op)
    if requested is not None and requested.name == PYTORCH:
        return Plan(Decision(PYTORCH, Config(), "asked for by name", "requested"), _by_pytorch)
    if grad:
        check_kernel_with_gradients(name, PYTORCH)
        return Plan(Decision(PYTORCH, Config(), NO_BACKWARD, "required"), _by_pytorch)
    problem, device = inputs.problem, inputs.x.device
    gpu = current_gpu(device) if inputs.x.is_cuda else None
    unable = {"ours": TRITON_MISSING} if TRITON_MISSING else {}
    while True:
        decision = select(problem, gpu, committed_table(), ours(), PYTORCH, requested, unable)
        if decision.kernel == PYTORCH:
            return Plan(decision, _by_pytorch)
        kernel: MoEKernel = requested or kernel_named(decision.kernel, problem.op)
        guard = device_guard(inputs.x.get_device())
        try:
            if kernel.plan is None:
                return Plan(decision, guard(_of_peer(kernel, decision.config, inputs)))
            with torch.cuda.device_of(inputs.x):
                return Plan(with_launch_path(decision), guard(kernel.plan(inputs, decision.config)))
        except CannotServe as refusal:
            unable[kernel.name] = str(refusal)  # the next turn passes the kernel over, or says why


def _by_pytorch(one: MoEInputs) -> torch.Tensor:
    return pytorch_moe(one.x, one.w1, one.w2, one.topk_weights, one.topk_ids, one.activation, one.gate_up_bias, one.down_bias)


def _of_peer(kernel: MoEKernel, config: Config, inputs: MoEInputs) -> Callable[[MoEInputs], torch.Tensor]:
    if inputs.activation != SWIGLU or inputs.gate_up_bias is not None or inputs.down_bias is not None:
        raise CannotServe("it takes SwiGLU without biases")
    return lambda given: kernel.run(given, config)


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
    activation = Activation(function, gated, interleaved, alpha, limit)
    inputs = inputs_of(x, w1, w2, weights, ids, activation, gate_up_bias, down_bias)
    return _plan(inputs, kernel_name, grad=False).call(inputs)


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
