"""What merges attention to parts of the keys: PyTorch's operators, and no kernel of ours yet."""

from __future__ import annotations

from flashmoe_science.ops.attention.call.merge import MergeKernel
from flashmoe_science.ops.attention.peers.merge import AT_ONCE, IN_TURNS

FALLBACK = AT_ONCE.name
PEERS: tuple[MergeKernel, ...] = (AT_ONCE, IN_TURNS)


def ours() -> tuple[MergeKernel, ...]:
    return ()
