"""Every kernel of the backward: ours, the preferred first, then the peers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.attention.peers import sdpa_backward

if TYPE_CHECKING:
    from flashmoe_science.ops.attention.call.backward import BackwardKernel
    from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem

FALLBACK = "sdpa_bwd"  # PyTorch's own, as a user calls it
PEERS: tuple[BackwardKernel, ...] = sdpa_backward.KERNELS


@cache
def ours() -> tuple[BackwardKernel, ...]:
    """Our kernels; none where Triton is missing: PyTorch's operators serve every call then."""
    if TRITON_MISSING:
        return ()
    from flashmoe_science.ops.attention.backward.split_sm90 import kernel as bwd_gluon_sm90
    from flashmoe_science.ops.attention.backward.tiled_triton import kernel as bwd_triton

    return (bwd_gluon_sm90.KERNEL, bwd_triton.KERNEL)


def outruns_pytorch(kernel: str, problem: AttentionBackwardProblem) -> bool:
    """Whether a kernel of ours was faster than the backward that PyTorch chooses, on such problems on an H100, though no record
    says so: wider heads than 128 columns, and without groups, up to 2048 queries and keys, wider ones than 64
    (docs/notes/backward.md)."""
    width, longest = max(problem.head_dim, problem.head_dim_v), max(problem.seqlen_q, problem.seqlen_k)
    short = problem.heads == problem.heads_kv and longest <= 2048
    return kernel == "bwd_gluon_sm90" and (width > 128 or (width > 64 and short))
