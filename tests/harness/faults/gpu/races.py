"""Adds up parts of the answer with atomics, in whatever order they come, and promises the same bits every time."""

import torch
import triton
import triton.language as tl
from base import LOG2E


@triton.jit
def racing_kernel(q_base, k_base, v_base, lse_base, acc_base, scale_log2, seqlen, D: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, D)
    q = tl.load(q_base + (head * seqlen + row) * D + dims).to(tl.float32)
    at = (head * seqlen + keys[:, None]) * D + dims[None, :]
    inside = keys[:, None] < seqlen
    k = tl.load(k_base + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_base + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sum(k * q[None, :], 1) * scale_log2 - tl.load(lse_base + head * seqlen + row)
    p = tl.where(keys < seqlen, tl.exp2(s), 0.0)
    tl.atomic_add(acc_base + (head * seqlen + row) * D + dims, tl.sum(p[:, None] * v, 0))


def attention(q, k, v, causal=False, softmax_scale=None):
    if causal:
        raise ValueError("causal is True; it must be False")
    batch, heads, rows, width = q.shape
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    lse = torch.logsumexp(q.float() @ k.float().transpose(-1, -2) * scale, -1) * LOG2E
    acc = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    grid = (rows, batch * heads, triton.cdiv(rows, 16))
    racing_kernel[grid](q, k, v, lse, acc, scale * LOG2E, rows, D=width, BLOCK=16)
    return acc.to(q.dtype)


attention.promises = {"deterministic": True}  # type: ignore[attr-defined]
