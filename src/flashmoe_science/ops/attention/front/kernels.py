"""Every attention kernel: ours, the preferred first, then the peers."""

from __future__ import annotations

from functools import cache

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.attention.call.kernel import AttentionKernel
from flashmoe_science.ops.attention.peers import fa3, fa4, flashinfer, flashinfer_fa2, flex, sdpa

FALLBACK = "sdpa"  # PyTorch's own attention, as a user calls it
PEERS: tuple[AttentionKernel, ...] = (
    *sdpa.KERNELS,
    fa3.KERNEL,
    fa4.KERNEL,
    flashinfer.KERNEL,
    flashinfer_fa2.KERNEL,
    flex.KERNEL,
)


@cache
def ours() -> tuple[AttentionKernel, ...]:
    """Our kernels; none where Triton is missing: PyTorch's attention serves every call then, and the decisions say why."""
    if TRITON_MISSING:
        return ()
    from flashmoe_science.ops.attention.forward import short_gluon
    from flashmoe_science.ops.attention.forward import tiled_triton as fwd_triton
    from flashmoe_science.ops.attention.forward.chunked_sm90 import kernel as chunk_gluon_sm90
    from flashmoe_science.ops.attention.forward.fp32_sm90 import kernel as fp32_gluon_sm90
    from flashmoe_science.ops.attention.forward.prefill_sm90 import kernel as fwd_gluon_sm90
    from flashmoe_science.ops.attention.forward.splitkv import decode as decode_gluon
    from flashmoe_science.ops.attention.forward.splitkv import kernel as split_triton

    modules = (short_gluon, chunk_gluon_sm90, fwd_gluon_sm90, fp32_gluon_sm90, decode_gluon, split_triton, fwd_triton)
    return tuple(module.KERNEL for module in modules)
