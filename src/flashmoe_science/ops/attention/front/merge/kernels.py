"""What merges attention to parts of the keys: our kernel, and PyTorch's operators."""

from __future__ import annotations

from functools import cache

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.attention.call.merge import MergeKernel
from flashmoe_science.ops.attention.peers.merge import AT_ONCE, COMPILED, IN_TURNS

FALLBACK = AT_ONCE.name
PEERS: tuple[MergeKernel, ...] = (AT_ONCE, COMPILED, IN_TURNS)


@cache
def ours() -> tuple[MergeKernel, ...]:
    if TRITON_MISSING:
        return ()
    from flashmoe_science.ops.attention.forward import merge_parts_triton

    return (merge_parts_triton.KERNEL,)
