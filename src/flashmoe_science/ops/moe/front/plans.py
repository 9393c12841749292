"""Plan cache: the Decision for a mixture-of-experts call, and how its launches are bound, by the signature of the call.

A plan is found by all that a kernel is specialised on, and by the class of the number of tokens, on which the choice rests.
It holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

import torch

from flashmoe_science.dispatch.select import Decision, select
from flashmoe_science.dispatch.table import committed_table
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.kernel import CannotServe, Config
from flashmoe_science.operations import TRITON_MISSING, kernel_named
from flashmoe_science.ops.moe.call import (
    BoundMoE,
    MoEInputs,
    MoEKernel,
    MoELauncher,
    Options,
    Shape,
    Tensors,
    checked,
    inputs_of,
)
from flashmoe_science.ops.moe.front.kernels import FALLBACK as PYTORCH
from flashmoe_science.ops.moe.front.kernels import ours
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.pytorch import pytorch_moe
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
    """What serves calls of one kind, and why; ``bind(inputs, shape)`` makes the call of one number of tokens, whose result has
    that shape. ``by_address``: the launch depends on pointers only."""

    decision: Decision
    bind: Callable[[MoEInputs, Shape], BoundMoE]
    by_address: bool


PLANS: Cache[Hashable, Plan] = Cache(MOST_PLANS)


def bind_call(tensors: Tensors, options: Options, grad: bool) -> BoundMoE:
    """The call for arguments of ``fused_moe`` like these, which takes the tensors as they are given. Raises as it does."""
    (views, activation), shape = checked(tensors, options), tensors.x.shape
    if views.x.shape[0] == 0:
        return lambda hidden_states, *rest: torch.zeros_like(hidden_states)
    inputs = inputs_of(views, activation)
    plan = plan_of(inputs, options.kernel, grad)
    bound = plan.bind(inputs, shape)
    if not (plan.by_address and _in_place(inputs.tensors, tensors)):
        return lambda *given: bound(*inputs_of(*checked(Tensors(*given), options)).tensors).view(shape)
    return bound


def _in_place(seen: Tensors, given: Tensors) -> bool:
    """Whether a kernel's inputs have the addresses of the tensors of the call: none was copied on the way."""
    pairs = zip(seen, given, strict=True)
    return all(here is None or here.data_ptr() == there.data_ptr() for here, there in pairs if there is not None)


def plan_of(inputs: MoEInputs, kernel: str | None, grad: bool) -> Plan:
    """The plan for such inputs. Raises as ``fused_moe``."""
    p, x = inputs.problem, inputs.x
    key = (
        p.tokens if p in _measured() else rounded_up(p.tokens), p.experts, p.top_k, p.dim, p.hidden, x.device,
        x.stride(), inputs.w1.stride(), inputs.w2.stride(), inputs.activation, kernel, grad,
        tuple(None if one is None else (one.dtype, one.data_ptr() % 16) for one in inputs.tensors),
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
    rejected = {"ours": TRITON_MISSING} if TRITON_MISSING else {}
    while True:
        decision = select(problem, gpu, committed_table(), ours(), PYTORCH, requested, rejected)
        if decision.kernel == PYTORCH:
            return _by_pytorch(decision)
        kernel: MoEKernel = requested or kernel_named(decision.kernel, problem.op)
        if kernel.plan is None:
            return Plan(decision, _binder_of_peer(kernel, decision.config), by_address=False)
        try:
            with torch.cuda.device_of(inputs.x):
                launcher: MoELauncher = kernel.plan(inputs, decision.config)
        except CannotServe as refusal:
            rejected[kernel.name] = str(refusal)  # the next turn passes the kernel over, or says why
        else:
            return Plan(with_launch_path(decision), _binder(launcher, inputs.x.get_device()), by_address=True)


def _binder(launcher: MoELauncher, device: int) -> Callable[[MoEInputs, Shape], BoundMoE]:
    guard = device_guard(device)  # a call may compile when it is bound, and launches when it is made
    return guard(lambda like, shape: guard(launcher.bind(like, shape)))


def _by_pytorch(decision: Decision) -> Plan:
    def bind(like: MoEInputs, shape: Shape) -> BoundMoE:
        activation = like.activation
        return lambda *tensors: pytorch_moe(Tensors(*tensors), activation)

    return Plan(decision, bind, by_address=False)


def _binder_of_peer(kernel: MoEKernel, config: Config) -> Callable[[MoEInputs, Shape], BoundMoE]:
    def bind(like: MoEInputs, shape: Shape) -> BoundMoE:
        def call(*tensors: Any) -> torch.Tensor:
            return kernel.run(MoEInputs(problem, *Tensors(*tensors), activation), config)

        problem, activation = like.problem, like.activation
        return device_guard(like.x.get_device())(call)

    return bind
