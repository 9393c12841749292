"""A scalar FlashAttention-1: right, slow, and said to be 1.7 times as fast as PyTorch. The proof engine tells what is true.

It is built as a first attempt often is: one block for each batch and head, which goes through its queries and, for every tile
of them, through all keys, one tile after the other; products by scalar multiply-adds on 128 threads, no tensor cores.

    flashmoe prove examples/v1_attention.py:attention --against sdpa
    flashmoe prove examples/v1_attention.py:attention_v2 --against sdpa
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N, WARPS = 8, 16, 4


@triton.jit
def v1_attention_kernel(
    q_base, k_base, v_base, out_base, scale_log2,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    heads, group, seqlen_q, seqlen_k, causal_offset, rows_per_block,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    q_head = q_base + batch * stride_qb + head * stride_qh
    k_head = k_base + batch * stride_kb + head // group * stride_kh
    v_head = v_base + batch * stride_vb + head // group * stride_vh
    out_head = out_base + batch * stride_ob + head * stride_oh
    dims, dims_v = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    begin = tl.program_id(1) * rows_per_block
    for first_row in range(begin, tl.minimum(begin + rows_per_block, seqlen_q), BLOCK_M):
        rows = first_row + tl.arange(0, BLOCK_M)
        in_q = (rows[:, None] < seqlen_q) & (dims < D)
        q = tl.load(q_head + rows[:, None].to(tl.int64) * stride_qm + dims, mask=in_q, other=0.0).to(tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        for first_key in range(0, seqlen_k, BLOCK_N):  # also the keys that a causal mask hides
            keys = first_key + tl.arange(0, BLOCK_N)
            at = keys[:, None].to(tl.int64)
            in_k = keys[:, None] < seqlen_k
            k = tl.load(k_head + at * stride_kn + dims, mask=in_k & (dims < D), other=0.0).to(tl.float32)
            v = tl.load(v_head + at * stride_vn + dims_v, mask=in_k & (dims_v < DV), other=0.0).to(tl.float32)
            s = tl.sum(q[:, None, :] * k[None, :, :], 2) * scale_log2  # [BLOCK_M, BLOCK_N]
            visible = (keys[None, :] < seqlen_k) & (rows[:, None] < seqlen_q)
            if CAUSAL:
                visible = visible & (keys[None, :] <= rows[:, None] + causal_offset)
            s = tl.where(visible, s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2(s - shift[:, None])
            rescale = tl.exp2(row_max - shift)
            row_sum = row_sum * rescale + tl.sum(p, 1)
            # v first: with p first, Triton's compiler would recognise a matrix product and use tensor cores.
            acc = acc * rescale[:, None] + tl.sum(v[None, :, :] * p[:, :, None], 1)
            row_max = new_max
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        in_out = (rows[:, None] < seqlen_q) & (dims_v < DV)
        tl.store(out_head + rows[:, None].to(tl.int64) * stride_om + dims_v, acc.to(out_base.dtype.element_ty), mask=in_out)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, softmax_scale: float | None, rows_per_block: int
) -> torch.Tensor:
    """q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] -> [B, H, Sq, Dv]; the last query sees the last key."""
    batch, heads, seqlen_q, dim = q.shape
    heads_kv, seqlen_k, dim_v = k.shape[1], k.shape[2], v.shape[3]
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.empty(batch, heads, seqlen_q, dim_v, dtype=q.dtype, device=q.device)
    strides = [stride for tensor in (q, k, v, out) for stride in tensor.stride()[:3]]
    v1_attention_kernel[(batch * heads, triton.cdiv(seqlen_q, rows_per_block))](
        q, k, v, out, scale * 1.4426950408889634, *strides,
        heads, heads // heads_kv, seqlen_q, seqlen_k, seqlen_k - seqlen_q, rows_per_block,
        D=dim, DV=dim_v, BLOCK_D=triton.next_power_of_2(dim), BLOCK_DV=triton.next_power_of_2(dim_v),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, CAUSAL=causal, num_warps=WARPS,
    )  # fmt: skip
    return out


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    """V1: a block goes through all rows of its head, one tile after the other, though no row needs another."""
    return launch(q, k, v, causal, softmax_scale, rows_per_block=q.shape[2])


def attention_v2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, softmax_scale: float | None = None
) -> torch.Tensor:
    """V2, the first change that ``flashmoe diagnose`` names for V1: a block for each tile of rows, and nothing else."""
    return launch(q, k, v, causal, softmax_scale, rows_per_block=BLOCK_M)


attention.promises = {"kernel": "v1_attention_kernel", "threads": 128, "deterministic": True, "speedup": 1.7}  # type: ignore[attr-defined]
attention_v2.promises = {"kernel": "v1_attention_kernel", "threads": 128, "deterministic": True}  # type: ignore[attr-defined]
