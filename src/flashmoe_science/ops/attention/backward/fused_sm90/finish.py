"""dQ in its own dtype, of the fp32 sums: the last kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from flashmoe_science.ops.attention.device.band import QUERIES, packed_rows_at
from flashmoe_science.ops.attention.device.strided import in_units

SIZES = ("heads", "rows", "padded", "unseen", "batches")


@triton.jit(do_not_specialize=SIZES)
def flashmoe_bwd_scaled_triton(
    sums, turns, dq, cu_seqlens_q, scale, stride_b, stride_h, stride_m, heads, rows, padded, unseen, batches,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, TURNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """dQ = scale times the sums of 64 rows of a head, [B, H, padded / 64, 64 * WIDTH], whose order is another (work.py). No
    program wrote the sums of queries that see no key: the first ``unseen``, or of windows and packed sequences those of tiles
    of TURNS rows that ``turns`` counts none for."""
    if UNIT > 1:
        stride_b, stride_h, stride_m = in_units(stride_b, stride_h, stride_m, UNIT)
    tiles = padded // BLOCK_M
    pid = tl.program_id(0)
    head_all = (pid // tiles).to(tl.int64)
    place, dim = (pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None], tl.arange(0, WIDTH)[None, :]
    row, inside = place, place < rows
    if cu_seqlens_q is not None:
        row, inside = packed_rows_at(place, pid % tiles * BLOCK_M // QUERIES, cu_seqlens_q, batches, rows, QUERIES)
    written = row >= unseen if turns is None else tl.load(turns + pid * BLOCK_M // TURNS) > 0
    found = sums + pid.to(tl.int64) * (BLOCK_M * WIDTH) + tl.arange(0, BLOCK_M * WIDTH)
    if D < WIDTH:  # eight columns come after another
        found = tl.load(found, mask=tl.arange(0, BLOCK_M * WIDTH) < BLOCK_M * D)
    else:
        found = tl.load(found)
    found = found.reshape(WIDTH // 64, 8, 4, 8, 4, 2, 2)  # 64 columns, 8 of them, warp, row, 2 columns, 8 rows, column
    found = found.permute((2, 5, 3, 0, 1, 4, 6)).reshape(BLOCK_M, WIDTH)
    to = dq + head_all // heads * stride_b + head_all % heads * stride_h + row * stride_m + dim
    tl.store(to, tl.where(written, found * scale, 0.0).to(dq.dtype.element_ty), mask=inside & (dim < D))
