"""Merge of split_triton.py's partials of attention over pieces of the keys: a program for each row, or for a few columns.

Shapes: values [rows, places, Dv], then maxima and sums [rows, places, 2], all fp32 in one buffer, with the rows packed as
[batch, heads_kv, seqlen_q, group] -> O [B, H, Sq, Dv], LSE [B, H, Sq]; or packed queries. The order of the sums is that of the
places: equal partials give equal bits. chunk_merge.py is for many rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from flashmoe_science.ops.attention.device.lse_triton import log_sum_exp, lse_rows, with_sink
from flashmoe_science.ops.attention.device.ranges import takes_ranges, tiles_of
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.launch import cdiv, next_power_of_2

# Not specialised on: a new batch or length must not compile anew.
MERGE_SIZES = (
    "before", "seqlen_k", "stride_ob", "stride_oh", "stride_om", "stride_lse", "heads_kv", "seqlen_q", "splits", "places",
    "batches", "even_slope", "even_least", "rows", "new",
)  # fmt: skip
_MERGED_COLUMNS = 32  # of a program of the merge where each row has an SM to itself
_MERGED_AT_ONCE = 8192  # numbers of partials that a program of the merge has in flight
_RANGES_AT_ONCE = 2048  # the same of ranges, of which most sequences have few


@triton.jit
def _merged(
    sums, values, splits, dims, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, ALL_SPLITS: tl.constexpr
):  # fmt: skip
    """Maximum, sum and unscaled columns ``dims`` of a row of which there are ``splits`` partials, at most ALL_SPLITS."""
    split = tl.arange(0, ALL_SPLITS)
    all_max = tl.load(sums + 2 * split, mask=split < splits, other=float("-inf"))
    if BLOCK_S == ALL_SPLITS:
        own_sum = tl.load(sums + 2 * split + 1, mask=split < splits, other=0.0)
        # Not after the sums, which say what is unused: that would be a wait more.
        given = (split < splits)[:, None] & (dims[None, :] < DV)
        values = tl.load(values + split[:, None] * DV + dims[None, :], mask=given, other=0.0)
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
            part = begin + tl.arange(0, BLOCK_S)
            part_sum = tl.load(sums + 2 * part + 1, mask=part < splits, other=0.0)
            part_weight = tl.exp2(tl.load(sums + 2 * part, mask=part < splits, other=float("-inf")) - shift)
            given = (part < splits)[:, None] & (dims[None, :] < DV)
            part_values = tl.load(values + part[:, None] * DV + dims[None, :], mask=given, other=0.0)
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
    """Merge BLOCK_DV columns of the partials of a row, [rows, places, DV] and then [rows, places, 2] of maxima and sums, in the
    order of its places: of its ``splits`` pieces.

    Where programs may take ranges (ALL_RANGES > 0) rows are those of one sequence, and sequences' places follow one another.
    Where programs take them there are after the sums, for each sequence, its first place and how many it has, at most
    ALL_RANGES; where that is one the row is written already.
    """
    row = tl.program_id(0)
    most_rows = seqlen_q * GROUP
    sequence, row_in = row // most_rows, row % most_rows
    batch, query = sequence // heads_kv, row_in // GROUP
    head = sequence % heads_kv * GROUP + row_in % GROUP
    ranged = False
    if ALL_RANGES > 0:
        # Before the main kernel's end: its programs have begun, so that lengths are there. Not from a cache that may be old.
        tiles = tiles_of(cache_seqlens, leftpads, tl.arange(0, BATCHES), batches, before, new, seqlen_k, BLOCK_N, False)
        ranged, _ = takes_ranges(tiles, even_slope, even_least)
        if ALL_SPLITS == 1:  # nothing to merge in pieces; but one program waits, as this kernel must not end first
            if (ranged == 0) & (row > 0):
                return
    if EARLY_START:
        gdc_wait()
    if ALL_RANGES > 0 and ALL_SPLITS == 1:
        if ranged == 0:
            return
    first_q = 0
    if cu_seqlens_q is not None:
        first_q = tl.load(cu_seqlens_q + batch)
        if query >= tl.load(cu_seqlens_q + batch + 1) - first_q:
            return
    own_row, first_place = row, 0
    if ALL_RANGES > 0:
        own_row, first_place = row % rows, batch * splits
        if ranged:
            told = partials + tl.cast(rows, tl.int64) * places * (DV + 2) + 2 * batch
            first_place, splits = tl.load(told).to(tl.int32), tl.load(told + 1).to(tl.int32)
            if splits == 1:
                return
    first = tl.cast(own_row, tl.int64) * places + first_place
    sums = partials + tl.cast(rows, tl.int64) * places * DV + 2 * first
    values = partials + first * DV
    dims = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    if ALL_RANGES == 0:
        row_max, row_sum, acc = _merged(sums, values, splits, dims, DV, BLOCK_DV, BLOCK_S, ALL_SPLITS)
    elif ALL_SPLITS == 1:  # noqa: SIM114 (known when it is compiled, the other is not)
        row_max, row_sum, acc = _merged(sums, values, splits, dims, DV, BLOCK_DV, RANGES_S, ALL_RANGES)
    elif ranged:
        row_max, row_sum, acc = _merged(sums, values, splits, dims, DV, BLOCK_DV, RANGES_S, ALL_RANGES)
    else:  # fewer partials: less to load and to run through
        row_max, row_sum, acc = _merged(sums, values, splits, dims, DV, BLOCK_DV, BLOCK_S, ALL_SPLITS)
    if sinks is not None:
        row_max, row_sum, rescale = with_sink(tl.load(sinks + head), row_max, row_sum)
        acc = acc * rescale
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)
    batch64, head64, query64 = tl.cast(batch, tl.int64), tl.cast(head, tl.int64), first_q + tl.cast(query, tl.int64)
    out_row = out_base + batch64 * stride_ob + head64 * stride_oh + query64 * stride_om
    tl.store(out_row + dims, acc.to(out_base.dtype.element_ty), mask=dims < DV)
    if lse_base is not None and tl.program_id(1) == 0:
        lse_row = lse_rows(batch64, head64, query64, heads_kv * GROUP, stride_lse, cu_seqlens_q)
        tl.store(lse_base + lse_row, log_sum_exp(row_max, row_sum))


class Merged(NamedTuple):
    """What a build of the merge is specialised on: heads that share a key head, and Splits."""

    group: int
    pieces: int
    ranges: int
    batches: int


def merge_warps(rows: int, sm_count: int) -> int:
    """Of a program of the merge. One where each row has an SM to itself: no barrier stands between its sums then."""
    return 1 if rows <= sm_count else 4


def _merge_width(width_v: int, warps: int) -> int:
    """Columns of a program of the merge: all of a row, or a few of them by a single warp, which then waits for less."""
    return min(padded_head_dim(width_v), _MERGED_COLUMNS) if warps == 1 else padded_head_dim(width_v)


def merge_grid(rows: int, width_v: int, warps: int) -> tuple[int, int, int]:
    return rows, cdiv(width_v, _merge_width(width_v, warps)), 1


def merge_constexprs(of: Merged, width_v: int, block_n: int, warps: int, early: bool) -> dict[str, Any]:
    block_dv = _merge_width(width_v, warps)
    most, few = (max(1, numbers // block_dv) for numbers in (_MERGED_AT_ONCE, _RANGES_AT_ONCE))
    of_pieces, of_ranges = next_power_of_2(of.pieces), next_power_of_2(of.ranges) if of.ranges else 0
    return {
        "GROUP": of.group,
        "DV": width_v,
        "BLOCK_DV": block_dv,
        "BLOCK_S": min(of_pieces, most),
        "ALL_SPLITS": of_pieces,
        "RANGES_S": min(of_ranges, few),
        "ALL_RANGES": of_ranges,
        "BATCHES": of.batches if of.ranges else 0,
        "BLOCK_N": block_n,
        "EARLY_START": early,
    }
