"""What is summed over rows: delta = rowsum(dO O) - dLSE, and parts of the gradient of the sinks. A gradient into the
log-sum-exp changes nothing else."""

from __future__ import annotations

import triton
import triton.language as tl

from flashmoe_science.ops.attention.backward.tiled_triton.tile import load_tile
from flashmoe_science.ops.attention.device.output_triton import lse_rows
from flashmoe_science.ops.attention.device.sinks_triton import sink_gradient
from flashmoe_science.ops.attention.device.strided import Strided, in_units

SIZES = ("heads", "rows", "batches", "parts")


@triton.jit(do_not_specialize=SIZES)
def flashmoe_bwd_delta_triton(
    out_base, dout_base, lse_base, dlse, sinks, cu_seqlens_q, delta_base, partials,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, heads, rows, batches, parts,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """delta of a tile of rows of a head, [B, H, rows]; of packed rows those of all sequences are one batch, of which only rows
    of a sequence count. Where there are sinks, also ``partials`` [H, parts]: what a
    tile adds to its head's gradient."""
    out = Strided(out_base, *in_units(stride_ob, stride_oh, stride_om, UNIT))
    dout = Strided(dout_base, *in_units(stride_dob, stride_doh, stride_dom, UNIT))
    tiles = tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    tile, head, batch = pid % tiles, pid // tiles % heads, (pid // tiles // heads).to(tl.int64)
    used = rows
    if cu_seqlens_q is not None:
        used = tl.minimum(tl.load(cu_seqlens_q + batches), rows)
    first, row, dims = tile * BLOCK_M, tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
    o = load_tile(out, batch, head, 0, tl.cast(first, tl.int64), row, used, dims, DV, BLOCK_DV, WIDE)  # [BLOCK_M, BLOCK_DV]
    do = load_tile(dout, batch, head, 0, tl.cast(first, tl.int64), row, used, dims, DV, BLOCK_DV, WIDE)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [BLOCK_M]
    at, inside = lse_rows(batch, tl.cast(head, tl.int64), first + row, heads, rows, cu_seqlens_q), first + row < used
    if dlse is not None:
        delta -= tl.load(dlse + at, mask=inside, other=0.0)
    tl.store(delta_base + at, delta, mask=inside)
    if sinks is not None:
        lse = tl.load(lse_base + at, mask=inside, other=float("inf"))
        total = sink_gradient(sinks, head, lse, delta)
        tl.store(partials + tl.cast(head, tl.int64) * parts + batch * tiles + tile, total)
