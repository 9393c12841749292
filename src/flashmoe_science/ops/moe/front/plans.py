"""What the first mixture-of-experts call of its kind works out and later ones reuse: a Decision, and how its calls are bound.

Plans are found by all that a kernel is specialised on, and by the class of the number of tokens, on which the choice rests.
They hold no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import NamedTuple

import torch

from flashmoe_science.dispatch.select import Decision, select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.operations import TRITON_MISSING, kernel_named
from flashmoe_science.ops.moe.call.inputs import SWIGLU, BoundMoE, MoEInputs, MoEKernel, MoELauncher, Shape, call_bound
from flashmoe_science.ops.moe.call.spec import Options, Tensors, checked, inputs_of
from flashmoe_science.ops.moe.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.moe.front.kernels import ours
from flashmoe_science.ops.moe.front.pytorch import pytorch_moe
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.plan import (
    MOST_PLANS,
    NO_BACKWARD,
    Cache,
    check_kernel_with_gradients,
    device_guard,
    with_launch_path,
)
from flashmoe_science.problem import rounded_up


class Plan(NamedTuple):
    """What serves calls of one kind, and why; ``bind(inputs, shape)`` makes the call of one number of tokens, whose
    result has that shape. ``by_address``: the call
    looks at nothing of its tensors but where they lie."""

    decision: Decision
    bind: Callable[..., BoundMoE]
    by_address: bool


PLANS: Cache[Hashable, Plan] = Cache(MOST_PLANS)


def bind_call(tensors: Tensors, options: Options, grad: bool) -> BoundMoE:
    """The call for arguments of ``fused_moe`` like these, which takes the tensors as they are given. Raises as it does."""
    views, shape = checked(tensors, options), tensors[0].shape
    if views[0].shape[0] == 0:
        return lambda hidden_states, *rest: torch.zeros_like(hidden_states)
    inputs = inputs_of(*views)
    plan = plan_of(inputs, options[-1], grad)
    bound = plan.bind(inputs, shape)
    if not (plan.by_address and _in_place(inputs, tensors)):
        return lambda *given: call_bound(bound, inputs_of(*checked(given, options))).view(shape)
    return bound


def _in_place(inputs: MoEInputs, tensors: Tensors) -> bool:
    """Whether a kernel's inputs lie where the tensors of the call do: none was copied on the way."""
    one = inputs
    seen = (one.x, one.w1, one.w2, one.topk_weights, one.topk_ids, one.gate_up_bias, one.down_bias)
    pairs = zip(seen, tensors, strict=True)
    return all(here is None or here.data_ptr() == there.data_ptr() for here, there in pairs if there is not None)


def plan_of(inputs: MoEInputs, kernel: str | None, grad: bool) -> Plan:
    """The plan for such inputs. Raises as ``fused_moe``."""
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
        return _by_pytorch(Decision(PYTORCH, Config(), "asked for by name", "requested"))
    if grad:
        check_kernel_with_gradients(name, PYTORCH)
        return _by_pytorch(Decision(PYTORCH, Config(), NO_BACKWARD, "required"))
    problem, gpu = inputs.problem, gpu_of(inputs.x)
    unable = {"ours": TRITON_MISSING} if TRITON_MISSING else {}
    while True:
        decision = select(problem, gpu, committed_table(), ours(), PYTORCH, requested, unable)
        if decision.kernel == PYTORCH:
            return _by_pytorch(decision)
        kernel: MoEKernel = requested or kernel_named(decision.kernel, problem.op)
        try:
            if kernel.plan is None:
                return Plan(decision, _binder_of_peer(kernel, decision.config, inputs), by_address=False)
            with torch.cuda.device_of(inputs.x):
                launcher: MoELauncher = kernel.plan(inputs, decision.config)
        except CannotServe as refusal:
            unable[kernel.name] = str(refusal)  # the next turn passes the kernel over, or says why
        else:
            return Plan(with_launch_path(decision), _binder(launcher, inputs.x.get_device()), by_address=True)


def _binder(launcher: MoELauncher, device: int) -> Callable[..., BoundMoE]:
    guard = device_guard(device)  # a call may compile when it is bound, and launches when it is made
    return guard(lambda like, shape: guard(launcher.bind(like, shape)))


def _by_pytorch(decision: Decision) -> Plan:
    def bind(like: MoEInputs, shape: Shape) -> BoundMoE:
        activation = like.activation
        return lambda x, w1, w2, weights, ids, gate_up_bias, down_bias: pytorch_moe(
            x, w1, w2, weights, ids, activation, gate_up_bias, down_bias
        )

    return Plan(decision, bind, by_address=False)


def _binder_of_peer(kernel: MoEKernel, config: Config, inputs: MoEInputs) -> Callable[..., BoundMoE]:
    if inputs.activation != SWIGLU or inputs.gate_up_bias is not None or inputs.down_bias is not None:
        raise CannotServe("it takes SwiGLU without biases")

    def bind(like: MoEInputs, shape: Shape) -> BoundMoE:
        def call(
            x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *no_biases: None
        ) -> torch.Tensor:  # fmt: skip
            return kernel.run(MoEInputs(problem, x, w1, w2, weights, ids), config)

        problem = like.problem
        return device_guard(like.x.get_device())(call)

    return bind
