"""A simple attention in Triton that is right and uses tensor cores: a block for each tile of queries, an online softmax.

flashmoe prove examples/online_softmax_attention.py:attention --against sdpa
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def online_softmax_kernel(
    q_base, k_base, v_base, out_base, scale_log2,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    heads, group, seqlen_q, seqlen_k, causal_offset,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_head = q_base + batch * stride_qb + head * stride_qh
    k_head = k_base + batch * stride_kb + head // group * stride_kh
    v_head = v_base + batch * stride_vb + head // group * stride_vh
    out_head = out_base + batch * stride_ob + head * stride_oh
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims, dims_v = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    at_rows, in_rows = rows[:, None].to(tl.int64), rows[:, None] < seqlen_q
    q = tl.load(q_head + at_rows * stride_qm + dims, mask=in_rows & (dims < D), other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    end = seqlen_k
    if CAUSAL:
        end = tl.minimum(end, tl.maximum((tl.program_id(0) + 1) * BLOCK_M + causal_offset, 0))
    for first_key in range(0, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        at_keys, in_keys = keys[:, None].to(tl.int64), keys[:, None] < seqlen_k
        k = tl.load(k_head + at_keys * stride_kn + dims, mask=in_keys & (dims < D), other=0.0)
        v = tl.load(v_head + at_keys * stride_vn + dims_v, mask=in_keys & (dims_v < DV), other=0.0)
        if INTERPRETED:  # the interpreter's bf16 dot is wrong (Triton 3.6 to 3.9), its fp32 dot is right
            s = tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32), input_precision="ieee") * scale_log2
        else:
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        visible = keys[None, :] < seqlen_k
        if CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None] + causal_offset)
        s = tl.where(visible, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if INTERPRETED:
            acc += tl.dot(p.to(v.dtype).to(tl.float32), v.to(tl.float32), input_precision="ieee")
        else:
            acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        row_max = new_max
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(out_head + at_rows * stride_om + dims_v, acc.to(out_base.dtype.element_ty), mask=in_rows & (dims_v < DV))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    """q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] -> [B, H, Sq, Dv]; the last query sees the last key."""
    batch, heads, seqlen_q, dim = q.shape
    heads_kv, seqlen_k, dim_v = k.shape[1], k.shape[2], v.shape[3]
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    block_m, block_n = (32, 32) if q.dtype == torch.float32 or max(dim, dim_v) > 128 else (64, 64)
    out = torch.empty(batch, heads, seqlen_q, dim_v, dtype=q.dtype, device=q.device)
    strides = [stride for tensor in (q, k, v, out) for stride in tensor.stride()[:3]]
    online_softmax_kernel[(triton.cdiv(seqlen_q, block_m), batch * heads)](
        q, k, v, out, scale * 1.4426950408889634, *strides,
        heads, heads // heads_kv, seqlen_q, seqlen_k, seqlen_k - seqlen_q,
        D=dim, DV=dim_v, BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_DV=max(16, triton.next_power_of_2(dim_v)),
        BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=causal, INTERPRETED=not q.is_cuda, num_warps=4,
    )  # fmt: skip
    return out


attention.promises = {"kernel": "online_softmax_kernel", "threads": 128, "deterministic": True}  # type: ignore[attr-defined]
