"""Selective activation checkpointing that keeps this package's results and recomputes the rest of a block."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from flashmoe_science import attention, moe  # noqa: F401  # they define the operators


def checkpoint_context() -> tuple[Any, Any]:
    """The ``context_fn`` for ``torch.utils.checkpoint.checkpoint``: attention and experts are not recomputed.

    ``checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_context)`` keeps their outputs and the log-sum-exp, each
    about as large as the block's input, and the experts' pre-activations (``fused_moe(recompute=True)``: none); norms,
    projections and what PyTorch's operators serve are recomputed.
    """
    operators = torch.ops.flashmoe
    kept = (operators.attention_forward, operators.moe_forward, operators.moe_forward_saving)
    routers = (operators.moe_route, operators.moe_route_with_losses)
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts([one.default for one in (*kept, *routers)])
    return contexts
