"""Merge of the partials that split-KV kernels leave: a program for each row of O, or for a few of its columns.

Shapes: partials (see device/partials.py), with the rows packed as [batch, heads_kv, seqlen_q, group] -> O [B, H, Sq, Dv],
LSE [B, H, Sq]; or packed queries. Sums are in the order of the slots: equal partials give equal bits. merge_gluon.py is for
many rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from flashmoe_science.ops.attention.device.output_triton import lse_rows
from flashmoe_science.ops.attention.device.partials import Partials, split_info_at, sums_at
from flashmoe_science.ops.attention.device.ranges import tiles_of, use_stream_k
from flashmoe_science.ops.attention.device.sequences import Sequences, packed_rows, write_rest
from flashmoe_science.ops.attention.device.softmax_triton import log_sum_exp, with_sink
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.launch import cdiv, next_power_of_2

# Not specialised on: a new batch or length must not compile anew.
MERGE_SIZES = (
    "before", "seqlen_k", "stride_ob", "stride_oh", "stride_om", "stride_lse", "heads_kv", "seqlen_q", "splits", "places",
    "batches", "even_slope", "even_least", "rows", "new",
)  # fmt: skip
_COLUMNS = 32  # of a program where each row has an SM to itself
_SPLITS_IN_FLIGHT = 8192  # numbers of partials that a program loads at once
_RANGES_IN_FLIGHT = 2048  # the same with stream-K, where most sequences have few splits


@triton.jit
def _sum_of_splits(
    sums, values, splits, dims, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, ALL_SPLITS: tl.constexpr
):  # fmt: skip
    """Maximum, sum and unscaled columns ``dims`` [BLOCK_DV] of a row with ``splits`` partials, at most ALL_SPLITS."""
    split = tl.arange(0, ALL_SPLITS)
    all_max = tl.load(sums + 2 * split, mask=split < splits, other=float("-inf"))  # [ALL_SPLITS]
    if BLOCK_S == ALL_SPLITS:
        own_sum = tl.load(sums + 2 * split + 1, mask=split < splits, other=0.0)
        # Not after the sums, which show what is unused: that would be a wait more.
        given = (split < splits)[:, None] & (dims[None, :] < DV)
        values = tl.load(values + split[:, None] * DV + dims[None, :], mask=given, other=0.0)  # [ALL_SPLITS, BLOCK_DV]
        row_max = tl.max(all_max, 0)
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        weight = tl.exp2(all_max - shift)
        # What a split without keys left unwritten may be NaN. (A sum of NaN is not 0: it is kept.)
        acc = tl.sum(tl.where((own_sum != 0.0)[:, None], values * weight[:, None], 0.0), 0)
        row_sum = tl.sum(own_sum * weight, 0)
    else:
        row_max = tl.max(all_max, 0)
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        acc = tl.zeros([BLOCK_DV], tl.float32)
        row_sum = 0.0
        for begin in range(0, splits, BLOCK_S):
            part = begin + tl.arange(0, BLOCK_S)  # [BLOCK_S]
            part_sum = tl.load(sums + 2 * part + 1, mask=part < splits, other=0.0)
            part_weight = tl.exp2(tl.load(sums + 2 * part, mask=part < splits, other=float("-inf")) - shift)
            given = (part < splits)[:, None] & (dims[None, :] < DV)
            part_values = tl.load(values + part[:, None] * DV + dims[None, :], mask=given, other=0.0)  # [BLOCK_S, BLOCK_DV]
            acc += tl.sum(tl.where((part_sum != 0.0)[:, None], part_values * part_weight[:, None], 0.0), 0)
            row_sum += tl.sum(part_sum * part_weight, 0)
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=MERGE_SIZES)
def flashmoe_merge_triton(
    partials, out_base, lse_base, sinks, cu_seqlens_q, cache_seqlens, leftpads, before, seqlen_k,
    stride_ob, stride_oh, stride_om, stride_lse, heads_kv, seqlen_q, splits, places, batches, even_slope, even_least, rows, new,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, ALL_SPLITS: tl.constexpr,
    RANGES_S: tl.constexpr, ALL_RANGES: tl.constexpr, BATCHES: tl.constexpr, BLOCK_N: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """Merge BLOCK_DV columns of a row of O: its ``splits`` partials in ``places`` slots, at most ALL_SPLITS.

    With stream-K (ALL_RANGES > 0) rows are those of one sequence, and the sequences' slots follow one another: each sequence's
    first slot and its number of splits, at most ALL_RANGES, are stored after the sums. Where that is one the row is written
    already.
    """
    sequences = Sequences(
        cu_seqlens_q, None, cache_seqlens, None, leftpads, None, None, seqlen_q, seqlen_k, before, new
    )  # fmt: skip
    stored = Partials(partials, rows, places)
    row = tl.program_id(0)
    max_rows = seqlen_q * GROUP
    sequence, row_in = row // max_rows, row % max_rows
    batch, query = sequence // heads_kv, row_in // GROUP
    head = sequence % heads_kv * GROUP + row_in % GROUP
    stream_k = False
    if ALL_RANGES > 0:
        # Before the main kernel's end: its programs have begun, so that lengths are there. Not from L1, which may be stale.
        tiles = tiles_of(sequences, tl.arange(0, BATCHES), batches, BLOCK_N, False)  # [BATCHES]
        stream_k, _ = use_stream_k(tiles, even_slope, even_least)
        if ALL_SPLITS == 1:  # without stream-K nothing to merge; but one program waits, as this kernel must not end first
            if (stream_k == 0) & (row > 0):
                if cu_seqlens_q is None:  # noqa: SIM114 (a branch at compile time, the other is not)
                    return
                elif tl.load(cu_seqlens_q + batches, cache_modifier=".cg") >= stride_lse:  # nor is there a rest to write
                    return
    if EARLY_START:
        gdc_wait()
    first_q, queries = packed_rows(cu_seqlens_q, batch, seqlen_q)
    if cu_seqlens_q is not None:
        WIDTH: tl.constexpr = triton.next_power_of_2(DV)
        pair, dim, heads = tl.arange(0, 256 // WIDTH), tl.arange(0, WIDTH), heads_kv * GROUP
        write_rest(out_base, lse_base, stride_oh, stride_om, cu_seqlens_q, batches, stride_lse, heads, pair, dim, DV)
    if ALL_RANGES > 0 and ALL_SPLITS == 1:
        if stream_k == 0:
            return
    if cu_seqlens_q is not None:
        if query >= queries:
            return
    own_row, first_slot = row, 0
    if ALL_RANGES > 0:
        own_row, first_slot = row % rows, batch * splits
        if stream_k:
            info = split_info_at(stored, batch, DV)
            first_slot, splits = tl.load(info).to(tl.int32), tl.load(info + 1).to(tl.int32)
            if splits == 1:
                return
    slot = tl.cast(own_row, tl.int64) * places + first_slot
    sums = sums_at(stored, slot, DV)
    values = partials + slot * DV
    dims = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    if ALL_RANGES == 0:
        row_max, row_sum, acc = _sum_of_splits(sums, values, splits, dims, DV, BLOCK_DV, BLOCK_S, ALL_SPLITS)
    elif ALL_SPLITS == 1:  # noqa: SIM114 (a branch at compile time, the other is not)
        row_max, row_sum, acc = _sum_of_splits(sums, values, splits, dims, DV, BLOCK_DV, RANGES_S, ALL_RANGES)
    elif stream_k:
        row_max, row_sum, acc = _sum_of_splits(sums, values, splits, dims, DV, BLOCK_DV, RANGES_S, ALL_RANGES)
    else:  # fewer partials: less to load and to run through
        row_max, row_sum, acc = _sum_of_splits(sums, values, splits, dims, DV, BLOCK_DV, BLOCK_S, ALL_SPLITS)
    if sinks is not None:
        row_max, row_sum, rescale = with_sink(tl.load(sinks + head), row_max, row_sum)
        acc = acc * rescale
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)  # [BLOCK_DV]
    batch64, head64, query64 = tl.cast(batch, tl.int64), tl.cast(head, tl.int64), first_q + tl.cast(query, tl.int64)
    out_row = out_base + batch64 * stride_ob + head64 * stride_oh + query64 * stride_om
    tl.store(out_row + dims, acc.to(out_base.dtype.element_ty), mask=dims < DV)
    if lse_base is not None and tl.program_id(1) == 0:
        lse_row = lse_rows(batch64, head64, query64, heads_kv * GROUP, stride_lse, cu_seqlens_q)
        tl.store(lse_base + lse_row, log_sum_exp(row_max, row_sum))


class Merged(NamedTuple):
    """What a build of the merge is specialised on: heads that share a key head, and fields of Splits."""

    group: int
    splits: int
    ranges: int
    batches: int


def merge_warps(rows: int, sm_count: int) -> int:
    """Warps of a program of the merge: one where each row has an SM to itself, as no barrier is between its sums then."""
    return 1 if rows <= sm_count else 4


def _merge_width(width_v: int, warps: int) -> int:
    """Columns of a program of the merge: all of a row, or a few of them by a single warp, which then waits for less."""
    return min(padded_head_dim(width_v), _COLUMNS) if warps == 1 else padded_head_dim(width_v)


def merge_grid(rows: int, width_v: int, warps: int) -> tuple[int, int, int]:
    return rows, cdiv(width_v, _merge_width(width_v, warps)), 1


def merge_constexprs(of: Merged, width_v: int, block_n: int, warps: int, early: bool) -> dict[str, Any]:
    """The merge's constexprs, in its order."""
    block_dv = _merge_width(width_v, warps)
    max_splits, max_ranges = (max(1, numbers // block_dv) for numbers in (_SPLITS_IN_FLIGHT, _RANGES_IN_FLIGHT))
    all_splits, all_ranges = next_power_of_2(of.splits), next_power_of_2(of.ranges) if of.ranges else 0
    return {
        "GROUP": of.group,
        "DV": width_v,
        "BLOCK_DV": block_dv,
        "BLOCK_S": min(all_splits, max_splits),
        "ALL_SPLITS": all_splits,
        "RANGES_S": min(all_ranges, max_ranges),
        "ALL_RANGES": all_ranges,
        "BATCHES": of.batches if of.ranges else 0,
        "BLOCK_N": block_n,
        "EARLY_START": early,
    }
