"""Every kernel of the experts' backward: ours, the preferred first, then the peers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.moe.peers import backward

if TYPE_CHECKING:
    from flashmoe_science.ops.moe.call.backward import BackwardKernel

FALLBACK = "grouped_mm_bwd"  # PyTorch's grouped products
PYTORCHS = (FALLBACK, "grouped_mm_train")  # the same under autograd, as records of steps have them
PEERS: tuple[BackwardKernel, ...] = backward.KERNELS


@cache
def ours() -> tuple[BackwardKernel, ...]:
    """Our kernels, the preferred first; none where Triton is missing: PyTorch's operators serve every call then."""
    if TRITON_MISSING:
        return ()
    from flashmoe_science.ops.moe.backward.gluon_sm90 import kernel as gluon_sm90
    from flashmoe_science.ops.moe.backward.grouped_triton import kernel as grouped_triton

    return (gluon_sm90.KERNEL, grouped_triton.KERNEL)
