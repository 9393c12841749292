"""The routers of peers: the softmax over the ``top_k`` largest logits of a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashmoe_science.kernel import AnyKernel
from flashmoe_science.ops.moe.peers import at_load, sonicmoe, triton_kernels

# What the experts of its own kernel take as weights and ids.
Router = Callable[[torch.Tensor], tuple[Any, Any]]


def by_pytorch(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [T, K] fp32, ids [T, K] int64), in no order. The softmax over the chosen logits is the softmax over all of them,
    renormalised over the chosen, in two launches fewer. Nothing waits for the host."""
    chosen, ids = logits.topk(top_k, dim=-1, sorted=False)
    return torch.softmax(chosen, -1, dtype=torch.float32), ids


def has_ours(kernel: AnyKernel) -> bool:
    """Whether ``route`` is called before a kernel's experts."""
    return kernel.origin == "ours" or kernel.name == at_load.NAME


def router_of(kernel: str, top_k: int) -> Router:
    """The router that is called before a peer's experts."""
    own = {sonicmoe.KERNEL.name: sonicmoe.route, triton_kernels.NAME: triton_kernels.route}
    router = own.get(kernel, by_pytorch)
    return lambda logits: router(logits, top_k)
