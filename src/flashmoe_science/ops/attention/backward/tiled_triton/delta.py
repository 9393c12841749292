"""What is summed over rows: delta, and the gradient of the sinks.

delta = rowsum(dO O) - dLSE; a gradient into the log-sum-exp changes nothing else. A sink's logit has probability
exp(sink - lse) in each row, and no value: dsink = -sum of it times delta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmoe_science.ops.attention.backward.tiled_triton.tile import load_tile
from flashmoe_science.ops.attention.device.output_triton import lse_rows
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
    if UNIT > 1:
        stride_ob, stride_oh, stride_om = in_units(stride_ob, stride_oh, stride_om, UNIT)
        stride_dob, stride_doh, stride_dom = in_units(stride_dob, stride_doh, stride_dom, UNIT)
    out = Strided(out_base, stride_ob, stride_oh, stride_om)
    dout = Strided(dout_base, stride_dob, stride_doh, stride_dom)
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
        sink = tl.load(sinks + head).to(tl.float32)
        p = tl.exp2((sink - lse) * 1.4426950408889634)
        total = tl.sum(tl.where(lse == float("-inf"), 0.0, -p * delta), 0)  # -inf: the sink is too
        tl.store(partials + tl.cast(head, tl.int64) * parts + batch * tiles + tile, total)


@triton.jit(do_not_specialize=SIZES)
def flashmoe_bwd_dsinks_triton(partials, dsinks, parts, BLOCK: tl.constexpr):
    """The gradient of a head's sink: its partials in their order."""
    head, place = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, BLOCK):
        at = first + place
        total += tl.load(partials + tl.cast(head, tl.int64) * parts + at, mask=at < parts, other=0.0)
    tl.store(dsinks + head, tl.sum(total, 0).to(dsinks.dtype.element_ty))
