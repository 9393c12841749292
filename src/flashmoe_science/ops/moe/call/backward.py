"""What a backward of experts takes and gives: the tensors of the call, what the forward saved, and gradients by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch

from flashmoe_science.kernel import Config, Kernel
from flashmoe_science.ops.moe.call import SWIGLU, Activation, Options, Tensors, contiguous, inputs_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem

T = TypeVar("T")
Output = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


class BackwardTensors(NamedTuple):
    """The ``Tensors`` of the call, then the backward's other arguments.

    z: [T * K, rows of w1] in the dtype of x, contiguous: the first product and its bias before the activation. Rows are pairs
    of a token and a choice, sorted by expert, those of one expert in the order of the pairs; pairs without an expert here come
    last, and z is not read for them. None (never in a kernel): recompute it. dout: [T, H] in the dtype of x.
    """

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gate_up_scale: torch.Tensor | None
    down_scale: torch.Tensor | None
    gate_up_zero_point: torch.Tensor | None
    down_zero_point: torch.Tensor | None
    gate_up_input_scale: torch.Tensor | None
    down_input_scale: torch.Tensor | None
    z: torch.Tensor | None
    dout: torch.Tensor

    def of_call(self) -> Tensors:
        return Tensors(*self[:13])


INPUTS = ("x", "w1", "w2", "topk_weights", "gate_up_bias", "down_bias")  # those with gradients, in the gradients' order


class Wanted(NamedTuple):
    """Which gradients are asked for. That of an absent bias is not computed."""

    dx: bool = True
    dw1: bool = True
    dw2: bool = True
    dtopk_weights: bool = True
    dgate_up_bias: bool = True
    ddown_bias: bool = True


class ByInput(NamedTuple, Generic[T]):
    """The gradients, or what is to be allocated for them: each like its input; None if not asked for.

    dW1 and dW2 have the memory order of the weights, and are 0 for an expert without tokens.
    """

    dx: T | None
    dw1: T | None
    dw2: T | None
    dtopk_weights: T | None
    dgate_up_bias: T | None
    ddown_bias: T | None


class Sums(NamedTuple):
    """Tensors of w1's and w2's shapes to which dW1 and dW2 are added, in place of new ones; fp32 or the weights' dtype."""

    dw1: torch.Tensor | None = None
    dw2: torch.Tensor | None = None


ALL, NEW = Wanted(), Sums()


def checked_sums(weight_grads: object, tensors: Tensors, options: Options) -> Sums:
    """What the gradients of the weights are added to, as views like kernels' weights. Raises TypeError, ValueError:
    ``weight_grads`` of ``fused_moe`` that are not allowed."""
    if options.weight_format is not None:
        raise ValueError(f"weight_grads is given and weight_format is {options.weight_format!r}; it must be None then")
    if not isinstance(weight_grads, tuple | list) or len(weight_grads) != 2:
        raise TypeError("weight_grads must be a pair, for gate_up_proj and down_proj; None where autograd returns it")
    for nth, (one, weight) in enumerate(zip(weight_grads, (tensors.w1, tensors.w2), strict=True)):
        if one is None:
            continue
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"weight_grads[{nth}] is a {type(one).__name__}; it must be a torch.Tensor or None")
        if one.shape != weight.shape:
            raise ValueError(
                f"weight_grads[{nth}] has shape {tuple(one.shape)}; it must be {tuple(weight.shape)}, as the weights"
            )
        if one.dtype not in (torch.float32, weight.dtype):
            raise TypeError(f"weight_grads[{nth}] has dtype {one.dtype}; it must be float32 or {weight.dtype}")
        if any(size > 1 and not step for size, step in zip(one.shape, one.stride(), strict=True)):
            raise ValueError(f"weight_grads[{nth}] has strides {one.stride()}; no two of its elements may share their memory")
        if one.device != weight.device or one.requires_grad:
            raise ValueError(f"weight_grads[{nth}] must be on {weight.device}, as the weights, and require no gradient")
    return Sums(*(one.mT if options.transposed and one is not None else one for one in weight_grads))


Gradients = ByInput[torch.Tensor]
Outputs = ByInput[Output]


def gradients_like(tensors: BackwardTensors, wanted: Wanted, sums: Sums = NEW) -> Outputs:
    """Shapes, strides and dtypes of a call's gradients, except those that are added to tensors."""
    made: list[Output | None] = []
    for name, needed in zip(INPUTS, wanted, strict=True):
        one, total = getattr(tensors, name), getattr(sums, f"d{name}", None)
        if one is None or not needed or total is not None:
            made.append(None)
        elif name in ("w1", "w2"):
            made.append((tuple(one.shape), torch.empty_like(one, device="meta").stride(), one.dtype))
        else:
            made.append(contiguous(one.shape, one.dtype))
    return Outputs(*made)


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """The arguments of a kernel: the problem of the call, from ids; its tensors as kernels take them; its activation."""

    problem: MoEBackwardProblem
    tensors: BackwardTensors
    activation: Activation = SWIGLU
    wanted: Wanted = ALL
    sums: Sums = NEW


def backward_problem_of(problem: MoEProblem) -> MoEBackwardProblem:
    """The problem of a forward's backward."""
    return MoEBackwardProblem(**{one.name: getattr(problem, one.name) for one in fields(problem)})


def backward_inputs_of(tensors: BackwardTensors, activation: Activation, wanted: Wanted, sums: Sums = NEW) -> BackwardInputs:
    """The inputs of a kernel, of tensors that have been checked. Weights, x and z are never copied."""
    forward = inputs_of(tensors.of_call(), activation)
    given = BackwardTensors(*forward.tensors, tensors.z, tensors.dout)
    return BackwardInputs(backward_problem_of(forward.problem), given, activation, wanted, sums)


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
        """The tensors of the experts, with this routing."""
        return Tensors(self.x, self.w1, self.w2, topk_weights, topk_ids, self.gate_up_bias, self.down_bias)


# A backward bound to shapes, strides and dtypes, to the wanted gradients and the tensors that are added to. It uses only its
# arguments' addresses.
BackwardLaunch = Callable[[BackwardTensors, Sums], Gradients]
# What a kernel's ``plan`` returns: the launch for inputs like those planned for, of any number of tokens. It keeps no tensor.
BackwardBind = Callable[[BackwardInputs], BackwardLaunch]
BackwardKernel = Kernel[MoEBackwardProblem, BackwardInputs, Gradients]
our_kernel = partial(BackwardKernel, origin="ours", op="moe_backward")


def run_of(plan: Callable[[BackwardInputs, Config], BackwardBind]) -> Callable[[BackwardInputs, Config], Gradients]:
    """The ``run`` of a kernel that has a ``plan``."""
    return lambda inputs, config: plan(inputs, config)(inputs)(inputs.tensors, inputs.sums)
