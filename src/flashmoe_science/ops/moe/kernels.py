"""Every mixture-of-experts kernel: none of ours yet, then the peers."""

from __future__ import annotations

from flashmoe_science.ops.moe.inputs import MoEKernel
from flashmoe_science.ops.moe.peers import expert_loop, grouped_mm

FALLBACK = "grouped_mm"
PEERS: tuple[MoEKernel, ...] = (grouped_mm.KERNEL, expert_loop.KERNEL)


def ours() -> tuple[MoEKernel, ...]:
    return ()
