"""What a backward of experts takes and gives: the tensors of the call, what the forward saved, and gradients by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import torch

from flashmoe_science.kernel import Config, Kernel
from flashmoe_science.ops.moe.call import SWIGLU, Activation, Tensors, inputs_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem


class BackwardTensors(NamedTuple):
    """The ``Tensors`` of the call, then what the backward is given besides.

    z: [T * K, rows of w1] in the dtype of x, the first product and its bias before the activation. Rows are pairs of a token
    and a choice, sorted by expert, those of one expert in the order of the pairs; pairs without an expert here come last, and
    what z has for them is not read. None: to be computed again.
    dout: [T, H] in the dtype of x.
    """

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    z: torch.Tensor | None
    dout: torch.Tensor

    def of_call(self) -> Tensors:
        return Tensors(*self[:7])


class Wanted(NamedTuple):
    """Which gradients are asked for."""

    dx: bool = True
    dw1: bool = True
    dw2: bool = True
    dtopk_weights: bool = True
    dgate_up_bias: bool = False
    ddown_bias: bool = False


OF_ROUTING = Wanted()  # all that a call without biases has


class Gradients(NamedTuple):
    """Each in the shape, the dtype and the memory order of what it is the gradient of; None where it is not asked for."""

    dx: torch.Tensor | None
    dw1: torch.Tensor | None
    dw2: torch.Tensor | None
    dtopk_weights: torch.Tensor | None
    dgate_up_bias: torch.Tensor | None
    ddown_bias: torch.Tensor | None


INPUTS = ("x", "w1", "w2", "topk_weights", "gate_up_bias", "down_bias")  # what Wanted and Gradients are of, in their order


def empty_gradients(tensors: BackwardTensors, wanted: Wanted) -> Gradients:
    """The gradients of a call, to be written."""
    of = (getattr(tensors, name) if needed else None for name, needed in zip(INPUTS, wanted, strict=True))
    return Gradients(*(None if one is None else torch.empty_like(one) for one in of))


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """The arguments of a kernel: a problem from ids, and its tensors, of which routing and biases are contiguous."""

    problem: MoEBackwardProblem
    tensors: BackwardTensors
    activation: Activation = SWIGLU
    wanted: Wanted = OF_ROUTING


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step of training of a problem that starts from router logits [T, E] fp32: the forward, then all gradients by dout."""

    problem: MoEBackwardProblem
    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    router_logits: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    dout: torch.Tensor
    activation: Activation = SWIGLU

    def routed(self, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> Tensors:
        """The tensors of the experts when these have been chosen."""
        return Tensors(self.x, self.w1, self.w2, topk_weights, topk_ids, self.gate_up_bias, self.down_bias)


def backward_problem_of(problem: MoEProblem) -> MoEBackwardProblem:
    """The problem of a forward's backward."""
    return MoEBackwardProblem(**{one.name: getattr(problem, one.name) for one in fields(problem)})


def backward_inputs_of(tensors: BackwardTensors, activation: Activation, wanted: Wanted) -> BackwardInputs:
    """The inputs of a kernel, of tensors that have been checked. Weights, x and z are never copied."""
    forward, dout = inputs_of(tensors.of_call(), activation), tensors.dout
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    return BackwardInputs(
        backward_problem_of(forward.problem), BackwardTensors(*forward.tensors, tensors.z, dout), activation, wanted
    )


# launch(*tensors) -> Gradients: of BackwardTensors like those that it was bound to, of which only the addresses are used.
BackwardLaunch = Callable[..., Gradients]
# What a kernel's ``plan`` returns: bind(inputs), the launch for inputs like those planned for, of any number of tokens and any
# gradients that are asked for. Neither keeps a tensor.
BackwardBind = Callable[[BackwardInputs], BackwardLaunch]
BackwardKernel = Kernel[MoEBackwardProblem, BackwardInputs, Gradients]
our_kernel = partial(BackwardKernel, origin="ours", op="moe_backward")


def run_of(plan: Callable[[BackwardInputs, Config], BackwardBind]) -> Callable[[BackwardInputs, Config], Gradients]:
    """The ``run`` of a kernel that has a ``plan``."""
    return lambda inputs, config: plan(inputs, config)(inputs)(*inputs.tensors)
