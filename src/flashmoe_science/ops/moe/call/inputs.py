"""The tensors of one mixture-of-experts call, and what stands between its two products."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flashmoe_science.kernel import Kernel
from flashmoe_science.ops.moe.problem import MoEProblem

if TYPE_CHECKING:
    import torch

Function = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_silu"]


@dataclass(frozen=True, slots=True)
class Activation:
    """What an expert does between its products, in fp32.

    ``function`` of the gate, times the up projection where ``gated``. "clamped_silu" is gpt-oss's: the gate at most ``limit``,
    the up projection within ``limit`` of 0, then ``(up + 1) * gate * sigmoid(alpha * gate)``. Rows of the first weights are
    all gates, then all ups; where ``interleaved``, a gate and its up in turn.
    """

    function: Function = "silu"
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0


SWIGLU = Activation()


@dataclass(frozen=True, slots=True)
class MoEInputs:
    """The tensors of one MoEProblem, shaped as it says. Biases are contiguous: [experts, 2 * hidden] (or hidden, where the
    activation is not gated) and [experts, dim]."""

    problem: MoEProblem
    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    activation: Activation = SWIGLU
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RouterInputs:
    """The tensors of one MoEProblem that starts from router logits."""

    problem: MoEProblem
    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    router_logits: torch.Tensor

    def routed(self, problem: MoEProblem, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> MoEInputs:
        """The inputs of the experts, where these have been chosen; ``problem`` is ``self.problem.from_ids()``."""
        return MoEInputs(problem, self.x, self.w1, self.w2, topk_weights, topk_ids)


# (x, w1, w2, topk_weights, topk_ids, gate_up_bias, down_bias) -> out: a call that checks nothing. It looks at the addresses of
# these tensors only; their shapes, strides and dtypes are those that it was bound for.
BoundMoE = Callable[..., "torch.Tensor"]


Shape = tuple[int, ...]


def of_result(like: MoEInputs, shape: Shape | None) -> tuple[Shape, Shape]:
    """Shape and strides of a contiguous result."""
    shape, dim = shape or (like.problem.tokens, like.problem.dim), like.problem.dim
    strides = [dim * math.prod(shape[place + 1 : -1]) for place in range(len(shape) - 1)]
    return tuple(shape), (*strides, 1)


class MoELauncher(ABC):
    """What a kernel's ``plan`` gives: it serves inputs like those that it was planned for, of any number of tokens that the
    kernel takes. Holds no tensor."""

    @abstractmethod
    def bind(self, like: MoEInputs, shape: Shape | None = None) -> BoundMoE:
        """The call for one number of tokens: all that depends on it is worked out here. ``shape``: of its result, where it
        is not [tokens, dim]."""

    def __call__(self, inputs: MoEInputs) -> torch.Tensor:
        return call_bound(self.bind(inputs), inputs)


def call_bound(bound: BoundMoE, one: MoEInputs) -> torch.Tensor:
    return bound(one.x, one.w1, one.w2, one.topk_weights, one.topk_ids, one.gate_up_bias, one.down_bias)


MoEKernel = Kernel[MoEProblem, MoEInputs, "torch.Tensor"]
