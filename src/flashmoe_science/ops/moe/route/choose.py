"""Whether the router's kernels serve a call, or PyTorch's operators do."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from flashmoe_science.hardware.gpus import why_no_triton
from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.moe.route.spec import Options


def why_pytorch(logits: torch.Tensor, options: Options) -> str | None:
    """Why PyTorch's operators serve a call, in words; None where the kernels do."""
    if logits.dtype == torch.float64:
        return "router_logits has dtype torch.float64, which the kernel does not take"
    refusal: str | None = TRITON_MISSING or why_no_triton(gpu_of(logits)) or kernels().cannot(options, logits.shape[-1])
    return refusal


@cache
def kernels() -> ModuleType:
    """The module of the kernel, which brings Triton: an import of this one need not wait for it."""
    from flashmoe_science.ops.moe.route import triton as route_triton

    return route_triton


@cache
def losses_kernels() -> ModuleType:
    """The same of the losses'."""
    from flashmoe_science.ops.moe.route import losses_triton

    return losses_triton


@cache
def backward_kernels() -> ModuleType:
    """The same of the backward's."""
    from flashmoe_science.ops.moe.route import backward_triton

    return backward_triton
