"""What a backward of a mixture of experts takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from flashmoe_science.kernel import Kernel
from flashmoe_science.ops.moe.call import SWIGLU, Activation, contiguous
from flashmoe_science.ops.moe.problem import MoEProblem

T = TypeVar("T")
Output = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


class BackwardTensors(NamedTuple):
    """The tensors of a call, what its forward saved, and the gradient of its result.

    As kernels take them: x [T, H], w1 [E, 2I, H] ([E, I, H] without a gate), w2 [E, H, I] in any strides; the routing [T, K]
    and biases [E, 2I] and [E, H] contiguous; z [pairs, rows of w1], the first product with its bias, contiguous, its rows in
    the order of ``rows.py``; dout [T, H].
    """

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    z: torch.Tensor
    dout: torch.Tensor


class Wanted(NamedTuple):
    """Which gradients are asked for. One of a bias that there is not is not computed."""

    dx: bool = True
    dw1: bool = True
    dw2: bool = True
    dtopk_weights: bool = True
    dgate_up_bias: bool = True
    ddown_bias: bool = True


class ByInput(NamedTuple, Generic[T]):
    """The gradients, or what is to be allocated for them: each like what it is the gradient of; None where it is not asked for.

    The rows of an expert's dW1 and dW2 without tokens are 0.
    """

    dx: T | None
    dw1: T | None
    dw2: T | None
    dtopk_weights: T | None
    dgate_up_bias: T | None
    ddown_bias: T | None


class Sums(NamedTuple):
    """Tensors of w1's and w2's shapes that dW1 and dW2 are added to, in place of new ones; fp32 or of the weights' dtype."""

    dw1: torch.Tensor | None = None
    dw2: torch.Tensor | None = None


ALL, NEW = Wanted(), Sums()
Gradients = ByInput[torch.Tensor]
Outputs = ByInput[Output]


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """The arguments of a kernel: the problem of the call, from ids; its tensors as kernels take them; its activation."""

    problem: MoEProblem
    tensors: BackwardTensors
    activation: Activation = SWIGLU
    wanted: Wanted = ALL
    sums: Sums = NEW


# A backward bound to shapes, strides and dtypes, to the gradients that are wanted and the tensors that are added to.
BackwardLaunch = Callable[[BackwardTensors, Sums], Gradients]
# What a kernel's ``plan`` returns: the launch for inputs like those planned for, of any number of tokens.
BackwardBind = Callable[[BackwardInputs], BackwardLaunch]
BackwardKernel = Kernel[Any, BackwardInputs, Gradients]
our_kernel = partial(BackwardKernel, origin="ours", op="moebwd")


def gradients_like(inputs: BackwardInputs) -> Outputs:
    """Shapes, strides and dtypes of the gradients of a call, those aside that are added to tensors."""
    t, wanted, sums = inputs.tensors, inputs.wanted, inputs.sums
    of_weights = [
        (tuple(one.shape), torch.empty_like(one, device="meta").stride(), one.dtype) if needed and total is None else None
        for one, needed, total in zip((t.w1, t.w2), wanted[1:3], sums, strict=True)
    ]
    of_others = [
        contiguous(tuple(one.shape), one.dtype) if needed and one is not None else None
        for one, needed in zip((t.x, t.topk_weights, t.gate_up_bias, t.down_bias), (wanted[0], *wanted[3:]), strict=True)
    ]
    return Outputs(of_others[0], *of_weights, *of_others[1:])
