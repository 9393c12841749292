"""What a backward of attention takes and gives: the tensors of the call, what the forward gave, and gradients by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from flashmoe_science.kernel import Config, Kernel
from flashmoe_science.ops.attention.call.outputs import TensorLike, strides_like
from flashmoe_science.ops.attention.call.tensors import Given, Options, Tensors, problem_of
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem


class Saved(NamedTuple):
    """What a backward is given beside the Tensors of the call: the forward's results, and the gradients into them.

    out, dout: [batch, heads, seqlen_q, head_dim_v] in the dtype of q, of any strides with a contiguous last dimension.
    lse, dlse: fp32 [batch, heads, seqlen_q], contiguous; of packed queries [1, heads, total_q]. None: no gradient into it.
    """

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None


class Wanted(NamedTuple):
    """Which gradients are asked for."""

    dq: bool = True
    dk: bool = True
    dv: bool = True
    dsinks: bool = False
    dbias: bool = False


class Gradients(NamedTuple):
    """Each in the shape, the dtype and the memory order of what it is the gradient of; None where it is not asked for.

    ``dbias`` has size 1 in each dimension in which the bias has stride 0: it is summed over it.
    """

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    dsinks: torch.Tensor | None
    dbias: torch.Tensor | None


class Outputs(NamedTuple):
    """The gradients' shapes, strides and dtypes."""

    dq: TensorLike | None
    dk: TensorLike | None
    dv: TensorLike | None
    dsinks: TensorLike | None
    dbias: TensorLike | None


def gradients_like(tensors: Tensors, wanted: Wanted) -> Outputs:
    """The Outputs of a call."""
    of_q, of_k, of_v = (
        TensorLike(tuple(one.shape), strides_like(one.shape, one.stride(), one.shape[3]), one.dtype) if needed else None
        for one, needed in zip(tensors[:3], wanted, strict=False)
    )
    sinks, bias, of_sinks, of_bias = tensors.sinks, tensors.bias, None, None
    if wanted.dsinks and sinks is not None:
        of_sinks = TensorLike(tuple(sinks.shape), (1,), sinks.dtype)
    if wanted.dbias and bias is not None:
        batch, heads, rows, columns = summed_shape(bias)
        strides = (heads * rows * columns, rows * columns, columns, 1)
        of_bias = TensorLike((batch, heads, rows, columns), strides, bias.dtype)
    return Outputs(of_q, of_k, of_v, of_sinks, of_bias)


def summed_shape(bias: torch.Tensor) -> tuple[int, ...]:
    """The shape of a bias without what it is expanded by."""
    return tuple(1 if stride == 0 else size for size, stride in zip(bias.shape, bias.stride(), strict=True))


def unexpanded(bias: torch.Tensor) -> torch.Tensor:
    """A view of a bias without what it is expanded by."""
    for dim, size in enumerate(bias.shape):
        if bias.stride(dim) == 0 and size > 1:
            bias = bias.narrow(dim, 0, 1)
    return bias


def backward_problem_of(tensors: Tensors, options: Options) -> AttentionBackwardProblem:
    """The problem of a call's backward. Raises ProblemError: as ``problem_of``; keys in a cache."""
    problem = problem_of(tensors, options)
    return AttentionBackwardProblem(**{one.name: getattr(problem, one.name) for one in fields(problem)})


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """One call of an AttentionBackwardProblem."""

    problem: AttentionBackwardProblem
    tensors: Tensors
    saved: Saved
    options: Options
    softmax_scale: float
    wanted: Wanted


BackwardKernel = Kernel[AttentionBackwardProblem, BackwardInputs, Gradients]
# launch(tensors, saved, softmax_scale) -> Gradients: of tensors in the order of Tensors and of Saved like those that it was
# bound to, of which only the addresses are used.
BackwardLaunch = Callable[[Given, Given, float], Gradients]


class BackwardLauncher(ABC):
    """A kernel with a config, for tensors of any lengths, batch and strides, and any gradients that are asked for; all else is
    as in the inputs it was planned for: dtypes, head dimensions, features, alignment to 16 bytes, the kind of mask. It holds no
    tensor."""

    @abstractmethod
    def bind(self, tensors: Tensors, saved: Saved, options: Options, wanted: Wanted) -> BackwardLaunch:
        """The launch for tensors of these shapes, strides and alignments. It compiles if need be, and raises CannotServe."""


def run_planned(kernel: BackwardKernel, inputs: BackwardInputs, config: Config) -> Gradients:
    """Plan, bind and launch once."""
    return planned(kernel, config, inputs)(inputs)


def planned(kernel: BackwardKernel, config: Config, like: BackwardInputs) -> Callable[[BackwardInputs], Gradients]:
    """A call of the kernel on inputs like these: it allocates and launches."""
    assert kernel.plan is not None
    launcher: BackwardLauncher = kernel.plan(like, config)
    launch = launcher.bind(like.tensors, like.saved, like.options, like.wanted)
    return lambda inputs: launch(inputs.tensors, inputs.saved, inputs.softmax_scale)
