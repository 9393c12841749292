"""The tensors of one mixture-of-experts call, and what stands between its two products."""

from __future__ import annotations

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


MoEKernel = Kernel[MoEProblem, MoEInputs, "torch.Tensor"]
