"""Selective activation checkpointing that keeps what this package computed, and computes the rest of a block again."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from flashmoe_science import attention, moe  # noqa: F401  # they define the operators


def checkpoint_context() -> tuple[Any, Any]:
    """What ``torch.utils.checkpoint.checkpoint`` takes as ``context_fn``: attention and experts are not computed again.

    ``checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_context)`` holds their outputs and the log-sum-exp, about
    as many bytes as the block's input for each, and the experts' pre-activations (``fused_moe(recompute=True)``: none); norms,
    projections and what PyTorch's operators serve are computed again.
    """
    operators = torch.ops.flashmoe
    kept = (operators.attention_forward, operators.moe_forward, operators.moe_forward_saving)
    routers = (operators.moe_route, operators.moe_route_with_losses)
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts([one.default for one in (*kept, *routers)])
    return contexts
