"""dQ in its own dtype, of the fp32 sums: the last kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from flashmoe_science.ops.attention.device.strided import in_units

SIZES = ("heads", "rows", "padded", "unseen")


@triton.jit(do_not_specialize=SIZES)
def flashmoe_bwd_scaled_triton(
    sums, dq, scale, stride_b, stride_h, stride_m, heads, rows, padded, unseen,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """dQ = scale times the sums, [B, H, padded, WIDTH], of a tile of rows of a head. The first ``unseen`` rows see no key: no
    program wrote their sums."""
    if UNIT > 1:
        stride_b, stride_h, stride_m = in_units(stride_b, stride_h, stride_m, UNIT)
    tiles = padded // BLOCK_M
    pid = tl.program_id(0)
    head_all = (pid // tiles).to(tl.int64)
    row, dim = (pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (dim < D)
    found = tl.load(sums + (head_all * padded + row) * WIDTH + dim, mask=inside & (row >= unseen), other=0.0)
    to = dq + head_all // heads * stride_b + head_all % heads * stride_h + row * stride_m + dim
    tl.store(to, (found * scale).to(dq.dtype.element_ty), mask=inside)
