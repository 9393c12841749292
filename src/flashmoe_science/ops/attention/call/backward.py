"""What a backward of attention takes and gives: the call's tensors, the forward's results, and gradients by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch

from flashmoe_science.kernel import Config, Kernel
from flashmoe_science.ops.attention.call.outputs import TensorLike, strides_like
from flashmoe_science.ops.attention.call.tensors import Given, Options, Tensors, problem_of
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem

T = TypeVar("T")


class Saved(NamedTuple):
    """A backward's arguments besides the call's Tensors: the forward's results, and the gradients into them.

    out, dout: [batch, heads, seqlen_q, head_dim_v] in the dtype of q, of any strides with a contiguous last dimension.
    lse, dlse: fp32 [batch, heads, seqlen_q], of packed queries [1, heads, total_q]; contiguous, aligned to 16 bytes. None: no
        gradient into it.
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


class ByInput(NamedTuple, Generic[T]):
    """The gradients, or what is to be allocated for them: each in its input's shape, dtype and memory order; None if not asked
    for.

    ``dbias`` has size 1 in each dimension in which the bias has stride 0: it is summed there.
    """

    dq: T | None
    dk: T | None
    dv: T | None
    dsinks: T | None
    dbias: T | None


Gradients = ByInput[torch.Tensor]
Outputs = ByInput[TensorLike]


def gradients_like(tensors: Tensors, wanted: Wanted) -> Outputs:
    """The shapes, strides and dtypes of a call's gradients."""
    of_q, of_k, of_v = (
        TensorLike(tuple(one.shape), strides_like(one.shape, one.stride(), one.shape[3]), one.dtype) if needed else None
        for one, needed in zip(tensors[:3], wanted, strict=False)
    )
    sinks, bias, of_sinks, of_bias = tensors.sinks, tensors.bias, None, None
    if wanted.dsinks and sinks is not None:
        of_sinks = TensorLike(tuple(sinks.shape), (1,), sinks.dtype)
    if wanted.dbias and bias is not None:
        batch, heads, rows, columns = unexpanded(bias).shape
        strides = (heads * rows * columns, rows * columns, columns, 1)
        of_bias = TensorLike((batch, heads, rows, columns), strides, bias.dtype)
    return Outputs(of_q, of_k, of_v, of_sinks, of_bias)


def unexpanded(bias: torch.Tensor) -> torch.Tensor:
    """A view of a bias without its expanded dimensions."""
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
our_kernel = partial(BackwardKernel, origin="ours", op="attention_backward")
# launch(tensors, saved, softmax_scale) -> Gradients. The tensors, in the order of Tensors and of Saved, are like those that it
# was bound to; only their addresses are used.
BackwardLaunch = Callable[[Given, Given, float], Gradients]


class BackwardLauncher(ABC):
    """A kernel with a config, for any lengths, batch and strides, and any gradients; all else is as in the inputs it was
    planned for: dtypes, head dimensions, features, alignment to 16 bytes, the kind of mask. It holds no tensor."""

    @abstractmethod
    def bind(self, tensors: Tensors, saved: Saved, options: Options, wanted: Wanted) -> BackwardLaunch:
        """The launch for tensors of these shapes, strides and alignments. It compiles if need be, and raises CannotServe."""


Plan = Callable[[BackwardInputs, Config], BackwardLauncher]


def run_planned(plan: Plan) -> Callable[[BackwardInputs, Config], Gradients]:
    """``Kernel.run`` of a kernel with that plan: plan, bind and launch once."""
    return lambda inputs, config: planned(plan, config, inputs)(inputs)


def planned(plan: Plan, config: Config, like: BackwardInputs) -> Callable[[BackwardInputs], Gradients]:
    """A call of a kernel on inputs like these: it allocates and launches."""
    launcher = plan(like, config)
    launch = launcher.bind(like.tensors, like.saved, like.options, like.wanted)
    return lambda inputs: launch(inputs.tensors, inputs.saved, inputs.softmax_scale)
