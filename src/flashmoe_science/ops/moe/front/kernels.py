"""Every mixture-of-experts kernel: ours, the preferred first, then the peers."""

from __future__ import annotations

from functools import cache

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.moe.call import MoEKernel
from flashmoe_science.ops.moe.peers import at_load, humming, pytorch, sonicmoe, triton_kernels

FALLBACK = "grouped_mm"  # PyTorch's grouped products
PEERS: tuple[MoEKernel, ...] = (
    *(pytorch.GROUPED_MM, pytorch.BATCHED_MM, sonicmoe.KERNEL, pytorch.EXPERT_LOOP),
    *(at_load.KERNEL, humming.KERNEL, triton_kernels.KERNEL),
)


@cache
def ours() -> tuple[MoEKernel, ...]:
    """Our kernels; none where Triton is missing: PyTorch serves every call then, and the decisions have the reason."""
    if TRITON_MISSING:
        return ()
    from flashmoe_science.ops.moe.products import gemv, triton
    from flashmoe_science.ops.moe.products.fp8_sm90 import kernel as fp8_sm90
    from flashmoe_science.ops.moe.products.gemv_gluon import kernel as gemv_gluon
    from flashmoe_science.ops.moe.products.gluon_sm90 import kernel as gluon_sm90
    from flashmoe_science.ops.moe.products.weights_sm90 import kernel as weights_sm90

    of_hopper = gluon_sm90.KERNEL, weights_sm90.KERNEL, weights_sm90.OF_OTHERS, fp8_sm90.KERNEL
    return (gemv.KERNEL, gemv_gluon.KERNEL, *of_hopper, triton.KERNEL)
