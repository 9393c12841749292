"""Append of new keys and values to a cache, K rotated by its position, and rotation of queries, in one launch, in Triton.

Shapes: K [B, Hk, new, D] and V [B, Hk, new, Dv] views, or packed ones, [1, Hk, total, D] with ``cu_seqlens_new``; the cache is
contiguous or in pages (see problem/features.py); Q [B, H, Sq, D], or packed with ``cu_seqlens_q``. The semantics are those of
FlashAttention-3's ``flash_attn_with_kvcache``: new key i of a sequence is written at ``cache_seqlens + i`` (left padding counts
into it) and rotated by that position, or by ``rotary_seqlens + i``; query i by the same, or, where no mask depends on
positions, all queries by the first position. Lengths are read on the device and not written back.

A row that would be past the capacity, or in a page or a cache that there is not, is left out. Where two sequences name one
cache, which of them wins is undefined. Rotary embedding: Su et al. 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.attention.call.append import Append
from flashmoe_science.ops.attention.call.outputs import strides_like
from flashmoe_science.ops.attention.device.pages import page_of
from flashmoe_science.ops.attention.device.rotary import RotaryTables, first_position, in_tables, load_rotated
from flashmoe_science.ops.attention.device.sequences import cache_of, packed_rows
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.calls import device_guard, find_launch, guards_of, store_launch
from flashmoe_science.ops.launch import (
    INTERPRETING,
    Pointer,
    argument,
    can_start_early,
    cdiv,
    kept_build,
    next_power_of_2,
    stride_class,
)

_TILE = 2048  # elements that a program moves
_WARPS = 4
_MOVED = 6  # tensors of rows, the first of the kernel's
_TENSORS = 13  # of Append
_SIZES = ("heads", "heads_kv", "new", "queries", "capacity", "caches", "positions", "stride_table", "stride_cos")
_STRIDES = ("qb", "qh", "qm", "kb", "kh", "kn", "vb", "vh", "vn", "rb", "rh", "rm", "cb", "ch", "cn", "wb", "wh", "wn")


@triton.jit(do_not_specialize=_SIZES)
def flashmoe_append_triton(
    q_base, k_base, v_base, rotated_base, k_cache, v_cache,
    cache_seqlens, page_table, cache_batch_idx, cu_seqlens_new, cu_seqlens_q, cos, sin, rotary_seqlens,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_rb, stride_rh, stride_rm, stride_cb, stride_ch, stride_cn, stride_wb, stride_wh, stride_wn,
    heads, heads_kv, new, queries, capacity, caches, positions, stride_table, stride_cos,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, MOVING: tl.constexpr, EARLY_START: tl.constexpr,
):  # fmt: skip
    """Move BLOCK_R rows of a sequence and head: of keys, of values, or of queries."""
    if EARLY_START:
        gdc_launch_dependents()
        gdc_wait()
    tiles = tl.cdiv(tl.maximum(new, queries), BLOCK_R)
    pid = tl.program_id(0)
    rest = pid // tiles
    every = heads + 2 * heads_kv  # of keys, of values and, last, of queries
    batch, head = rest // every, rest % every
    rows = pid % tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = tl.load(cache_seqlens + batch)
    place = begin + rows
    tables = RotaryTables(cos, sin, rotary_seqlens, positions, stride_cos)
    turn = first_position(tables, batch, begin)
    batch64, rows64 = batch.to(tl.int64), rows.to(tl.int64)
    dims = tl.arange(0, BLOCK_D)

    if head >= 2 * heads_kv:
        if q_base is not None:
            first_q, queries = packed_rows(cu_seqlens_q, batch, queries)
            q_head = (head - 2 * heads_kv).to(tl.int64)
            q_inside = (rows < queries)[:, None] & (dims < D)[None, :]
            position = in_tables(tables, turn + rows if MOVING else turn + 0 * rows)
            q_rows = batch64 * stride_qb + q_head * stride_qh + (first_q + rows64) * stride_qm
            q = load_rotated(q_base, q_rows, q_inside, dims, position, tables, HALF, INTERLEAVED)  # [BLOCK_R, BLOCK_D]
            r_rows = batch64 * stride_rb + q_head * stride_rh + (first_q + rows64) * stride_rm
            tl.store(rotated_base + r_rows[:, None] + dims[None, :], q.to(rotated_base.dtype.element_ty), mask=q_inside)
        return

    first_new, new = packed_rows(cu_seqlens_new, batch, new)
    written = (rows < new) & (place >= 0) & (place < capacity)
    if PAGE == 0:
        cached, line = cache_of(cache_batch_idx, batch) + 0 * rows64, place.to(tl.int64)
    else:
        cached = page_of(page_table + batch64 * stride_table, place, written, -1, PAGE).to(tl.int64)
        line = (place % PAGE).to(tl.int64)
    written = written & (cached >= 0) & (cached < caches)
    if head < heads_kv:
        k_head = head.to(tl.int64)
        k_inside = written[:, None] & (dims < D)[None, :]
        k_rows = batch64 * stride_kb + k_head * stride_kh + (first_new + rows64) * stride_kn
        k_lines = cached * stride_cb + k_head * stride_ch + line * stride_cn
        if HALF > 0:
            k = load_rotated(k_base, k_rows, k_inside, dims, in_tables(tables, turn + rows), tables, HALF, INTERLEAVED)
        else:
            k = tl.load(k_base + k_rows[:, None] + dims[None, :], mask=k_inside, other=0.0)  # [BLOCK_R, BLOCK_D]
        tl.store(k_cache + k_lines[:, None] + dims[None, :], k.to(k_cache.dtype.element_ty), mask=k_inside)
    else:
        v_head = (head - heads_kv).to(tl.int64)
        dims_v = tl.arange(0, BLOCK_DV)
        v_inside = written[:, None] & (dims_v < DV)[None, :]
        v_rows = batch64 * stride_vb + v_head * stride_vh + (first_new + rows64) * stride_vn
        v_lines = cached * stride_wb + v_head * stride_wh + line * stride_wn
        v = tl.load(v_base + v_rows[:, None] + dims_v[None, :], mask=v_inside, other=0.0)  # [BLOCK_R, BLOCK_DV]
        tl.store(v_cache + v_lines[:, None] + dims_v[None, :], v, mask=v_inside)


def append(a: Append) -> torch.Tensor | None:
    """Append, and rotate the queries where there are rotary tables; checks nothing.

    Returns:
        The rotated queries, in the memory order of ``q``; None without rotary tables.
    """
    given = [one for one in a[:_TENSORS] if one is not None]
    key = (Append, a.k.shape, tuple([one is None for one in a[:_TENSORS]]), a.max_seqlen_new, *a[_TENSORS:])
    launch = find_launch(key, given)
    if launch is None:
        guard = device_guard(a.k.get_device())
        launch = guard(guard(bind)(a))
        store_launch(key, guards_of(given, aligned=True), launch)
    rotated: torch.Tensor | None = launch(a)
    return rotated


def _pointers(a: Append, rotated: Any) -> tuple[Any, ...]:
    """The kernel's tensors in its order: those whose rows it moves, then those that are read by single elements."""
    q = None if a.rotary_cos is None else a.q
    cu_seqlens_q = None if a.rotary_cos is None else a.cu_seqlens_q
    return (
        q, a.k, a.v, rotated, a.k_cache, a.v_cache,
        a.cache_seqlens, a.page_table, a.cache_batch_idx, a.cu_seqlens_k_new, cu_seqlens_q, a.rotary_cos, a.rotary_sin,
        a.rotary_seqlens,
    )  # fmt: skip


def bind(a: Append) -> Callable[[Append], torch.Tensor | None]:
    """The launch for tensors of these shapes and strides."""
    k, v, q, rotary = a.k, a.v, a.q, a.rotary_cos is not None
    (_, heads_kv, _, width), width_v = k.shape, v.shape[3]
    batch, rows = a.cache_seqlens.shape[0], a.max_seqlen_new
    block_d, block_dv = padded_head_dim(width), padded_head_dim(width_v)
    out_strides = strides_like(q.shape, q.stride(), width)
    heads, query_rows, of_q, of_rotated = 0, 0, (0, 0, 0), (0, 0, 0)
    if rotary:
        heads, query_rows = q.shape[1], q.shape[2] if a.cu_seqlens_q is None else a.max_seqlen_q
        of_q, of_rotated = _row_strides(q.stride(), a.cu_seqlens_q), _row_strides(out_strides, a.cu_seqlens_q)
    of_k, of_v = _row_strides(k.stride(), a.cu_seqlens_k_new), _row_strides(v.stride(), a.cu_seqlens_k_new)
    strides = (*of_q, *of_k, *of_v, *of_rotated, *a.k_cache.stride()[:3], *a.v_cache.stride()[:3])
    most = max(rows, query_rows, 1)  # a packed batch may bring no new key: one masked tile then
    block_r = min(max(1, _TILE // max(block_d, block_dv)), next_power_of_2(most))
    table, page, (positions, half, stride_cos) = a.page_table, a.page, (0, 0, 0)
    if a.rotary_cos is not None:
        positions, half, stride_cos = (*a.rotary_cos.shape, a.rotary_cos.stride(0))
    capacity, stride_table = (a.k_cache.shape[2], 0) if table is None else (table.shape[1] * page, table.stride(0))
    numbers = (*strides, heads, heads_kv, rows, query_rows, capacity, a.k_cache.shape[0], positions, stride_table, stride_cos)
    early = not INTERPRETING and can_start_early(k.device)
    moving, interleaved = rotary and not a.one_position, rotary and a.rotary_interleaved
    constexprs = (width, width_v, block_d, block_dv, block_r, page, half, interleaved, moving, early)
    start = _build(a, stride_class(strides), numbers, constexprs)
    grid, tail = (cdiv(most, block_r) * batch * (heads + 2 * heads_kv), 1, 1), (*numbers, *constexprs)

    def launch(a: Append) -> torch.Tensor | None:
        rotated = a.q.new_empty_strided(a.q.shape, out_strides) if rotary else None
        start(grid, *map(argument, _pointers(a, rotated)), *tail)
        return rotated

    return launch


def _row_strides(strides: tuple[int, ...], cu_seqlens: torch.Tensor | None) -> tuple[int, int, int]:
    """Strides of sequences, heads and rows; packed sequences are found by their first row."""
    return (strides[0] if cu_seqlens is None else 0, strides[1], strides[2])


def _build(a: Append, strides: Hashable, numbers: tuple[int, ...], constexprs: tuple[Any, ...]) -> Callable[..., None]:
    pointers = [
        None if one is None else Pointer(one.dtype, one.data_ptr() if place < _MOVED else 4)
        for place, one in enumerate(_pointers(a, None))
    ]
    if a.rotary_cos is not None:
        pointers[3] = Pointer(a.q.dtype)
    kinds = tuple([None if one is None else (one.dtype, one.data_ptr()) for one in pointers])
    key = (kinds, strides, a.k.device, constexprs)
    options = {"num_warps": _WARPS, "launch_pdl": bool(constexprs[-1])}
    return kept_build(key, flashmoe_append_triton, (*pointers, *numbers, *constexprs), **options).launch
