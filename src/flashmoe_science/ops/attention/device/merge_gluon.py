"""Merge of partial results over the splits of keys, of many rows at once, in Gluon: it runs at the L2 cache's speed.

Shapes: values [rows, splits, Dv], then maxima and sums [rows, splits, 2], all fp32 in one buffer, with the rows packed as
[batch, heads_kv, seqlen_q, group] -> O [B, H, Sq, Dv] in fp16 or bf16, LSE [B, H, Sq]. Where packed queries end, rows are left
out. The order of the sums is that of the splits: equal partials give equal bits.

A warp has a row, or several of narrow heads, and each of its threads four numbers of every split: no load of a thread depends
on another, and its sums over the splits take no other thread. ``flashmoe_merge_triton`` of merge_triton.py, a program for each
row, has fewer rows in mind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from flashmoe_science.ops.attention.device.output import rest_lanes
from flashmoe_science.ops.attention.device.sequences import write_rest
from flashmoe_science.ops.attention.device.softmax import as_column, log_sum_exp, normalizer
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.launch import Build, Pointer, cdiv

# Not specialised on: a new batch or length must not compile anew.
SIZES = ("stride_lse", "heads_kv", "seqlen_q", "splits", "rows")
WARPS = 4
MAX_AT_ONCE = 16  # splits whose values a thread has in flight, four registers each
_VECTOR = gl.constexpr(4)  # numbers of a load of 16 bytes


@gluon.jit
def _load_sums(sums, first, row_ok, splits, split):
    """Maxima and sums of rows, [BLOCK_S, BLOCK_R], whose first split is at ``first``; past the splits and rows -inf and 0."""
    given = gl.expand_dims(split < splits, 1) & gl.expand_dims(row_ok, 0)
    at = sums + 2 * (gl.expand_dims(first, 0) + gl.expand_dims(split, 1))
    return gl.load(at, mask=given, other=float("-inf")), gl.load(at + 1, mask=given, other=0.0)


@gluon.jit(do_not_specialize=SIZES)
def flashmoe_chunk_merge(
    partials, out_base, lse_base, cu_seqlens_q, sinks,
    stride_ob, stride_oh, stride_om, stride_lse, heads_kv, seqlen_q, splits, rows,
    GROUP: gl.constexpr, DV: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_S: gl.constexpr, ALL_SPLITS: gl.constexpr,
    EARLY_START: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    LANES: gl.constexpr = 32 if BLOCK_DV >= 128 else BLOCK_DV // _VECTOR  # of a row
    BLOCK_R: gl.constexpr = NUM_WARPS * (32 // LANES)
    layout: gl.constexpr = gl.BlockedLayout(
        [BLOCK_S, 1, _VECTOR], [1, 32 // LANES, LANES], [1, NUM_WARPS, 1], [2, 1, 0]
    )  # [BLOCK_S, BLOCK_R, BLOCK_DV]
    of_sums: gl.constexpr = gl.SliceLayout(2, layout)
    of_out: gl.constexpr = gl.SliceLayout(0, layout)
    of_rows: gl.constexpr = gl.SliceLayout(0, of_sums)

    row = gl.program_id(0) * BLOCK_R + gl.arange(0, BLOCK_R, of_rows)
    most_rows = seqlen_q * GROUP
    sequence, row_in = row // most_rows, row % most_rows
    batch, query = (sequence // heads_kv).to(gl.int64), row_in // GROUP
    head = (sequence % heads_kv * GROUP + row_in % GROUP).to(gl.int64)
    split = gl.arange(0, BLOCK_S, gl.SliceLayout(1, of_sums))
    dims = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, of_out))
    first = row.to(gl.int64) * splits
    sums = partials + rows.to(gl.int64) * splits * DV
    values_at = gl.expand_dims(first, 0) + gl.expand_dims(split, 1)
    values_at = partials + gl.expand_dims(values_at * DV, 2) + gl.expand_dims(gl.expand_dims(dims, 0), 0)
    row_ok = row < rows
    if EARLY_START:
        gdc_wait()
    first_q = gl.zeros([BLOCK_R], gl.int32, of_rows)
    if cu_seqlens_q is not None:
        first_q = gl.load(cu_seqlens_q + batch, mask=row_ok, other=0)
        row_ok = row_ok & (query < gl.load(cu_seqlens_q + batch + 1, mask=row_ok, other=0) - first_q)
        pair, dim = rest_lanes(BLOCK_DV)
        heads = heads_kv * GROUP
        batches = rows // (seqlen_q * heads)
        write_rest(out_base, lse_base, stride_oh, stride_om, cu_seqlens_q, batches, stride_lse, heads, pair, dim, DV)

    row_max = gl.full([BLOCK_R], float("-inf"), gl.float32, of_rows)
    for begin in range(0, ALL_SPLITS, BLOCK_S):
        split_max, _ = _load_sums(sums, first, row_ok, splits, begin + split)
        row_max = gl.maximum(row_max, gl.max(split_max, 0))
    shift = gl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = gl.zeros([BLOCK_R], gl.float32, of_rows)
    acc = gl.zeros([BLOCK_R, BLOCK_DV], gl.float32, of_out)
    for begin in range(0, ALL_SPLITS, BLOCK_S):
        split_max, split_sum = _load_sums(sums, first, row_ok, splits, begin + split)
        given = gl.expand_dims(begin + split < splits, 1) & gl.expand_dims(row_ok, 0)
        inside = gl.expand_dims(given, 2) & gl.expand_dims(gl.expand_dims(dims < DV, 0), 0)
        # Without a look at the sums, for which the load would wait. What a split without keys left unwritten may be NaN.
        values = gl.load(values_at + begin * DV, mask=inside, other=0.0)
        weight = gl.exp2(split_max - gl.expand_dims(shift, 0))
        seen = gl.expand_dims(split_sum != 0.0, 2)  # a sum of NaN is kept
        acc += gl.sum(gl.where(seen, values * gl.expand_dims(weight, 2), 0.0), 0)
        row_sum += gl.sum(split_sum * weight, 0)

    sink = sinks
    if sinks is not None:
        sink = gl.load(sinks + head, mask=row_ok, other=0.0)
    row_max, row_sum, scale = normalizer(row_max, row_sum, sink)
    acc = acc * as_column(scale, acc)
    out_row = batch * stride_ob + head * stride_oh + (first_q + query).to(gl.int64) * stride_om
    inside = as_column(row_ok, acc) & gl.expand_dims(dims < DV, 0)
    gl.store(out_base + as_column(out_row, acc) + gl.expand_dims(dims, 0), acc.to(out_base.dtype.element_ty), mask=inside)
    if lse_base is not None:
        lse_row = head
        if cu_seqlens_q is None:
            lse_row = batch * heads_kv * GROUP + head
        lse = log_sum_exp(row_max, row_sum)
        gl.store(lse_base + lse_row * stride_lse + first_q + query, lse, mask=row_ok)


def rows_at_once(width_v: int) -> int:
    """Rows of a program."""
    return WARPS * (32 // min(32, padded_head_dim(width_v) // 4))


def programs(rows: int, width_v: int) -> int:
    return cdiv(rows, rows_at_once(width_v))


def constexprs(group: int, width_v: int, splits: int, early: bool) -> dict[str, Any]:
    block_dv, all_splits = padded_head_dim(width_v), 1 << (splits - 1).bit_length()
    at_once = min(all_splits, max(1, MAX_AT_ONCE * 128 // max(128, block_dv)))
    return {
        "GROUP": group, "DV": width_v, "BLOCK_DV": block_dv, "BLOCK_S": at_once, "ALL_SPLITS": all_splits,
        "EARLY_START": early, "NUM_WARPS": WARPS,
    }  # fmt: skip


def build(
    out: Pointer, lse: Pointer | None, cu_seqlens_q: Pointer | None, sinks: Pointer | None, strides_out: Sequence[int],
    fixed: tuple[Any, ...], early: bool,
) -> Build:  # fmt: skip
    """The Build of the merge with these constexprs, for outputs of a class of strides."""
    arguments = (Pointer(torch.float32), out, lse, cu_seqlens_q, sinks, *strides_out, *[2] * len(SIZES), *fixed)
    return Build(flashmoe_chunk_merge, arguments, num_warps=WARPS, launch_pdl=early)
