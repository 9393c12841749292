"""What is summed over rows before the products: delta, parts of the sinks' gradient, and the log-sum-exp as those take it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashmoe_science.ops.attention.backward.copied import Builds, Start
from flashmoe_science.ops.attention.backward.sizes import Sizes
from flashmoe_science.ops.attention.call.backward import Saved
from flashmoe_science.ops.attention.device.band import KEYS, QUERIES, packed_rows_at
from flashmoe_science.ops.attention.device.sinks_triton import (
    PARTS_AT_ONCE,
    SINKS_WARPS,
    flashmoe_bwd_dsinks_triton,
    sink_gradient,
)
from flashmoe_science.ops.attention.device.strided import in_units
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.launch import Pointer, stand_in, stride_class, stride_unit

ROWS, ROWS_WARPS = 32, 4  # of a program that sums rows, without counters
_AT_ONCE = tl.constexpr(128)  # sequences that are compared
SIZES = ("heads", "rows", "padded", "batches")


@triton.jit
def _place_in_order(order, cu_seqlens_q, cu_seqlens_k, number, batches, ROWS: tl.constexpr):
    """Write the place of a sequence where those of the most queries come first, and of the rows that none owns, the last:
    ``order`` [2, batches + 1] has where keys would begin if sequences lay in this order (sequence_of_tile), and their numbers.
    """
    queries = -1
    if number < batches:
        queries = tl.load(cu_seqlens_q + number + 1) - tl.load(cu_seqlens_q + number)
    place = 0
    tiles = 0
    for first in range(0, batches, _AT_ONCE):
        other = first + tl.arange(0, _AT_ONCE)
        ok = other < batches
        others = tl.load(cu_seqlens_q + other + 1, mask=ok, other=0) - tl.load(cu_seqlens_q + other, mask=ok, other=0)
        before = ok & ((others > queries) | ((others == queries) & (other < number)))
        begin, end = tl.load(cu_seqlens_k + other, mask=ok, other=0), tl.load(cu_seqlens_k + other + 1, mask=ok, other=0)
        place += tl.sum(before.to(tl.int32))
        tiles += tl.sum(tl.where(before, end // ROWS - begin // ROWS, 0))
    tl.store(order + place, tiles * ROWS)
    tl.store(order + batches + 1 + place, number)


@triton.jit(do_not_specialize=SIZES)
def flashmoe_bwd_rows_triton(
    out, dout, lse, dlse, cu_seqlens_q, cu_seqlens_k, sinks, lse_log2, delta, partials, turns,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, heads, rows, padded, batches,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO O) - dLSE and the log-sum-exp in powers of two, [B, H, padded], of a tile of rows of a head. Rows that
    are not, and those that see no key, get a log-sum-exp of +inf: all of their probabilities are 0 then. Each of packed
    sequences begins a tile of QUERIES (band.py). Where there are sinks, also what a tile adds to the gradient of its head's,
    [H, B, tiles]. ``turns``: of fused_sm90, or None; a counter of each program, and one after them all, which are zeroed; of
    packed sequences, the order in which their keys start."""
    stride_ob, stride_oh, stride_om = in_units(stride_ob, stride_oh, stride_om, UNIT)
    stride_dob, stride_doh, stride_dom = in_units(stride_dob, stride_doh, stride_dom, UNIT)
    tiles = padded // BLOCK_M
    pid = tl.program_id(0)
    if turns is not None:
        tl.store(turns + pid, 0)
        tl.store(turns + tl.num_programs(0), 0)
        if cu_seqlens_q is not None and pid <= batches:
            order = turns + tl.num_programs(0) + 1
            _place_in_order(order, cu_seqlens_q, cu_seqlens_k, pid, batches, 2 * KEYS)
    head_all = (pid // tiles).to(tl.int64)
    batch, head = head_all // heads, head_all % heads
    row, dim = (pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64), tl.arange(0, BLOCK_DV)
    inside = row < rows
    place = row
    if cu_seqlens_q is not None:
        row, inside = packed_rows_at(place, pid % tiles * BLOCK_M // QUERIES, cu_seqlens_q, batches, 0, QUERIES)
    mask = inside[:, None] & (dim < DV)[None, :]
    o = tl.load(out + batch * stride_ob + head * stride_oh + row[:, None] * stride_om + dim, mask=mask, other=0.0)
    do = tl.load(dout + batch * stride_dob + head * stride_doh + row[:, None] * stride_dom + dim, mask=mask, other=0.0)
    total = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)  # [BLOCK_M]
    norm = tl.load(lse + head_all * rows + row, mask=inside, other=float("-inf"))
    if dlse is not None:
        total -= tl.load(dlse + head_all * rows + row, mask=inside, other=0.0)
    tl.store(delta + head_all * padded + place, total)
    if sinks is not None:
        at = (head * (tl.num_programs(0) // tiles // heads) + batch) * tiles + pid % tiles
        tl.store(partials + at, sink_gradient(sinks, head, norm, total))
    norm = tl.where(norm == float("-inf"), float("inf"), norm * 1.4426950408889634)
    tl.store(lse_log2 + head_all * padded + place, norm)


def bind_rows(
    builds: Builds, saved: Saved, sizes: Sizes, of_sinks: Pointer | None = None, of_turns: Pointer | None = None
) -> Start:
    """The launch of what is summed over rows: with counters, those of a tile of queries a program. Without, it is given no
    ``cu_seqlens_k``."""
    block_m = ROWS if of_turns is None else sizes.block_m
    of_out, of_dout = saved.out.stride()[:3], saved.dout.stride()[:3]
    width = saved.out.shape[3]
    constexprs = (width, padded_head_dim(width), block_m, stride_unit((*of_out, *of_dout)))
    heads = sizes.heads_kv * sizes.group
    numbers = (*of_out, *of_dout, heads, sizes.seqlen_q, sizes.padded, sizes.sequences or None)
    sums, starts = Pointer(torch.float32), Pointer(torch.int32, 4) if sizes.sequences else None
    of_keys = None if of_turns is None else starts
    given = (stand_in(saved.out), stand_in(saved.dout), sums, None if saved.dlse is None else sums, starts, of_keys, of_sinks)
    pointers = (*given, sums, sums, None if of_sinks is None else sums, of_turns)
    key = (saved.dlse is None, of_sinks is None, stride_class((*of_out, *of_dout)), constexprs)
    build = builds.get(key, flashmoe_bwd_rows_triton, (*pointers, *numbers, *constexprs), num_warps=ROWS_WARPS)
    return build.bound((sizes.padded // block_m * sizes.batch * heads, 1, 1), *numbers, *constexprs)


def bind_sinks(builds: Builds, of_sinks: Pointer, sizes: Sizes, rows: int) -> Start:
    """The launch that adds what each program of ``rows`` rows found of the sinks' gradient."""
    parts = sizes.padded // rows * sizes.batch
    arguments = (Pointer(torch.float32), of_sinks, parts, PARTS_AT_ONCE)
    build = builds.get(None, flashmoe_bwd_dsinks_triton, arguments, num_warps=SINKS_WARPS, num_stages=1)
    return build.bound((sizes.heads_kv * sizes.group, 1, 1), parts, PARTS_AT_ONCE)
