"""From tensors to problems."""

from __future__ import annotations

import torch

from flashmoe_science.ops.attention.problem import AttentionProblem, Layout, Mask
from flashmoe_science.problem import Dtype

DTYPES: dict[torch.dtype, Dtype] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def problem_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> AttentionProblem:
    """The AttentionProblem of [batch, heads, seqlen, head_dim] views that have been checked."""
    layout: Layout = "bshd" if q.stride(1) < q.stride(2) else "bhsd"
    return AttentionProblem(
        batch=q.shape[0],
        heads=q.shape[1],
        heads_kv=k.shape[1],
        seqlen_q=q.shape[2],
        seqlen_k=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=DTYPES[q.dtype],
        mask=mask,
        layout=layout,
    )
