"""Every kernel of the backward: ours, the preferred first, then the peers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.attention.peers import fa4_backward, sdpa_backward

if TYPE_CHECKING:
    from flashmoe_science.ops.attention.call.backward import BackwardKernel

FALLBACK = "sdpa_bwd"  # PyTorch's own, as a user calls it
FUSED = "bwd_fused_gluon_sm90"  # it computes dQ, dK and dV whatever is asked for
SPLIT = "bwd_gluon_sm90"  # it computes what is asked for, of all problems that the fused one serves
FLASH = sdpa_backward.FLASH  # FlashAttention 2's, of PyTorch's flash backend
PEERS: tuple[BackwardKernel, ...] = (*sdpa_backward.KERNELS, *fa4_backward.KERNELS)


@cache
def ours() -> tuple[BackwardKernel, ...]:
    """Our kernels, the preferred first, the portable one, which takes the most, last; none if Triton is missing: PyTorch then
    serves every call."""
    if TRITON_MISSING:
        return ()
    from flashmoe_science.ops.attention.backward.fused_sm90 import kernel as bwd_fused_gluon_sm90
    from flashmoe_science.ops.attention.backward.short_triton import kernel as bwd_short_triton
    from flashmoe_science.ops.attention.backward.split_sm90 import kernel as bwd_gluon_sm90
    from flashmoe_science.ops.attention.backward.tiled_triton import kernel as bwd_triton

    return (bwd_short_triton.KERNEL, bwd_fused_gluon_sm90.KERNEL, bwd_gluon_sm90.KERNEL, bwd_triton.KERNEL)
