"""The planes of Q, K and V of fp32_gluon_sm90: three arrays of bf16 that add up to a tensor of fp32.

Shapes: [B, H, S, D] in fp32, any strides -> [3, B * H, S, WIDTH] in bf16, where WIDTH is D rounded up to a multiple of 8.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

SPLIT_ROWS = 16  # of a program that splits numbers
# Not specialised on: a new batch or length must not compile anew.
PLANE_SIZES = ("heads", "heads_kv", "heads_all", "heads_kv_all", "seqlen_q", "seqlen_k", "blocks_q", "blocks_k")


@triton.jit
def _rounded(x):
    """x to bf16; what would round to infinity is cut off instead."""
    near = x.to(tl.bfloat16)
    cut = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(near.to(tl.float32)) == float("inf"), cut, near.to(tl.float32))


@triton.jit
def _split_rows(
    x_base, planes, block, heads, seqlen, heads_all, stride_b, stride_h, stride_m,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the three planes, [3, heads_all, seqlen, WIDTH], of a block of rows."""
    rows = heads_all.to(tl.int64) * seqlen
    row = block.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    head_all = row // seqlen
    at = head_all // heads * stride_b + head_all % heads * stride_h + row % seqlen * stride_m
    dims = tl.arange(0, BLOCK_D)[None, :]
    row_ok = (row < rows)[:, None]
    x = tl.load(x_base + at[:, None] + dims, mask=row_ok & (dims < D), other=0.0)
    out = planes + row[:, None] * WIDTH + dims
    inside = row_ok & (dims < WIDTH)
    for _ in tl.static_range(3):
        part = _rounded(x)
        tl.store(out, part.to(tl.bfloat16), mask=inside)
        x = tl.where(tl.abs(part) == float("inf"), 0.0, x - part)  # infinity is whole in its first plane
        out += rows * WIDTH


@triton.jit(do_not_specialize=PLANE_SIZES)
def flashmoe_fp32_planes(
    q_base, k_base, v_base, q_planes, k_planes, v_planes,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    heads, heads_kv, heads_all, heads_kv_all, seqlen_q, seqlen_k, blocks_q, blocks_k,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    EARLY_START: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if EARLY_START:
        gdc_wait()
    if block < blocks_q:
        _split_rows(
            q_base, q_planes, block, heads, seqlen_q, heads_all, stride_qb, stride_qh, stride_qm, D, WIDTH, BLOCK_D, BLOCK_R
        )
    elif block < blocks_q + blocks_k:
        block -= blocks_q
        _split_rows(
            k_base, k_planes, block, heads_kv, seqlen_k, heads_kv_all, stride_kb, stride_kh, stride_kn,
            D, WIDTH, BLOCK_D, BLOCK_R,
        )  # fmt: skip
    else:
        block -= blocks_q + blocks_k
        _split_rows(
            v_base, v_planes, block, heads_kv, seqlen_k, heads_kv_all, stride_vb, stride_vh, stride_vn,
            DV, WIDTH_V, BLOCK_D, BLOCK_R,
        )  # fmt: skip
