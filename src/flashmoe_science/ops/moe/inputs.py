"""The tensors of one mixture-of-experts call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashmoe_science.kernel import Kernel
from flashmoe_science.ops.moe.problem import MoEProblem

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MoEInputs:
    """The tensors of one MoEProblem, shaped as it says."""

    problem: MoEProblem
    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


MoEKernel = Kernel[MoEProblem, MoEInputs, "torch.Tensor"]
