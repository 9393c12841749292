"""A small Triton attention that the faults of this folder start from. By itself it is right.

Contiguous [B, H, S, D] with D a power of two from 16; a block of ``BLOCK_M`` queries goes through all keys.
"""

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def base_kernel(
    q_base, k_base, v_base, out_base, scale_log2, seqlen_q, seqlen_k,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK_LOADS: tl.constexpr,
    MASK_STORE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, D)[None, :]
    q = tl.load(q_base + (head * seqlen_q + rows[:, None]) * D + dims, mask=rows[:, None] < seqlen_q, other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for first_key in range(0, seqlen_k, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        at = (head * seqlen_k + keys[:, None]) * D + dims
        inside = keys[:, None] < seqlen_k
        if MASK_LOADS:
            k, v = tl.load(k_base + at, mask=inside, other=0.0), tl.load(v_base + at, mask=inside, other=0.0)
        else:
            k, v = tl.load(k_base + at), tl.load(v_base + at)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        visible = keys[None, :] < seqlen_k
        if CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
        s = tl.where(visible, s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        row_max = new_max
    acc = (acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]).to(out_base.dtype.element_ty)
    to = out_base + (head * seqlen_q + rows[:, None]) * D + dims
    if MASK_STORE:
        tl.store(to, acc, mask=rows[:, None] < seqlen_q)
    else:
        tl.store(to, acc)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    block: tuple[int, int] = (32, 32),
    warps: int = 4,
    stages: int = 3,
    mask_loads: bool = True,
    mask_store: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    batch, heads, rows, width = q.shape
    out = torch.empty_like(q) if out is None else out
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    base_kernel[(triton.cdiv(rows, block[0]), batch * heads)](
        q, k, v, out, scale * LOG2E, rows, k.shape[2],
        D=width, BLOCK_M=block[0], BLOCK_N=block[1], CAUSAL=causal,
        MASK_LOADS=mask_loads, MASK_STORE=mask_store, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
