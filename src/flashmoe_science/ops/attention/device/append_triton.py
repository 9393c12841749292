"""New keys and values written behind those of a cache, K rotated by its position, and queries rotated too: one launch.

Shapes: K [B, Hk, new, D] and V [B, Hk, new, Dv] views, or packed ones, [1, Hk, total, D] with ``cu_seqlens_new``; the cache as
problem/features.py says, contiguous or in pages; Q [B, H, Sq, D], or packed with ``cu_seqlens_q``. The semantics are those
of FlashAttention-3's ``flash_attn_with_kvcache``: new key i of a sequence is written at ``cache_seqlens + i`` (left padding
counts into it) and rotated by that position, or by ``rotary_seqlens + i``; query i by the same, or, where no mask depends on
positions, all queries by the first position. Lengths are read on the device and not written back.

A row that would lie past the capacity, or in a page or a cache that there is not, is left out. Where two sequences name one
cache, which of them wins is not said. Rotary embedding: Su et al. 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.ops.attention.call.inputs import output_strides
from flashmoe_science.ops.attention.front.append_fallback import Rotary
from flashmoe_science.ops.attention.problem import padded_head_dim
from flashmoe_science.ops.launch import (
    INTERPRETING,
    Build,
    Pointer,
    argument,
    can_start_early,
    cdiv,
    next_power_of_2,
    stride_class,
)
from flashmoe_science.ops.plan import MOST_CALLS, Cache, device_guard

_TILE = 2048  # elements that a program moves
_WARPS = 4
_SIZES = ("heads", "heads_kv", "new", "queries", "capacity", "caches", "positions", "stride_table", "stride_cos")
_STRIDES = ("qb", "qh", "qm", "kb", "kh", "kn", "vb", "vh", "vn", "rb", "rh", "rm", "cb", "ch", "cn", "wb", "wh", "wn")


@dataclass(frozen=True, slots=True)
class NewKeys:
    """What is appended, and where: see the module for shapes. All of one dtype, contiguous in the last dimension.

    cache_seqlens: int32 [batch], the keys of each sequence before the append.
    page_table: int32 [batch, most pages] and ``page`` the rows of a page, or None and 0.
    cache_batch_idx: int32 [batch], the row of the cache of each sequence (not with pages).
    cu_seqlens_new, max_seqlen_new: of packed new keys.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cache_seqlens: torch.Tensor
    page_table: torch.Tensor | None = None
    page: int = 0
    cache_batch_idx: torch.Tensor | None = None
    cu_seqlens_new: torch.Tensor | None = None
    max_seqlen_new: int = 0


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries to rotate. ``moving``: each by its own position (causal and local masks), else all by the first new key's."""

    q: torch.Tensor
    moving: bool
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int = 0


@triton.jit
def _rotated(source, sources, inside, dims, cos, sin, position, stride_cos, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows at ``sources`` from ``source``, rotated by ``position``: fp32 [rows, dims]."""
    x = tl.load(source + sources[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    if INTERLEAVED:
        partner, angle, second = dims ^ 1, dims // 2, dims % 2 == 1
    else:
        partner, angle, second = tl.where(dims < HALF, dims + HALF, dims - HALF), dims % HALF, dims >= HALF
    turned = inside & (dims < 2 * HALF)[None, :]
    y = tl.load(source + sources[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
    angles = (position * stride_cos)[:, None] + angle[None, :]
    c = tl.load(cos + angles, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angles, mask=turned, other=0.0).to(tl.float32)
    return x * c + tl.where(second[None, :], y, -y) * s


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
    turn = begin
    if rotary_seqlens is not None:
        turn = tl.load(rotary_seqlens + batch)
    batch64, rows64 = batch.to(tl.int64), rows.to(tl.int64)
    dims = tl.arange(0, BLOCK_D)

    if head >= 2 * heads_kv:
        if q_base is not None:
            first_q = 0
            if cu_seqlens_q is not None:
                first_q = tl.load(cu_seqlens_q + batch)
                queries = tl.load(cu_seqlens_q + batch + 1) - first_q
            q_head = (head - 2 * heads_kv).to(tl.int64)
            q_inside = (rows < queries)[:, None] & (dims < D)[None, :]
            position = turn + rows if MOVING else turn + 0 * rows
            position = tl.minimum(tl.maximum(position, 0), positions - 1).to(tl.int64)
            q_rows = batch64 * stride_qb + q_head * stride_qh + (first_q + rows64) * stride_qm
            q = _rotated(q_base, q_rows, q_inside, dims, cos, sin, position, stride_cos, HALF, INTERLEAVED)
            r_rows = batch64 * stride_rb + q_head * stride_rh + (first_q + rows64) * stride_rm
            tl.store(rotated_base + r_rows[:, None] + dims[None, :], q.to(rotated_base.dtype.element_ty), mask=q_inside)
        return

    first_new = 0
    if cu_seqlens_new is not None:
        first_new = tl.load(cu_seqlens_new + batch)
        new = tl.load(cu_seqlens_new + batch + 1) - first_new
    taken = (rows < new) & (place >= 0) & (place < capacity)
    if PAGE == 0:
        cached = batch64
        if cache_batch_idx is not None:
            cached = tl.load(cache_batch_idx + batch).to(tl.int64)
        cached, line = cached + 0 * rows64, place.to(tl.int64)
    else:
        table = page_table + batch64 * stride_table
        cached = tl.load(table + place // PAGE, mask=taken, other=-1).to(tl.int64)
        line = (place % PAGE).to(tl.int64)
    taken = taken & (cached >= 0) & (cached < caches)
    if head < heads_kv:
        k_head = head.to(tl.int64)
        k_inside = taken[:, None] & (dims < D)[None, :]
        k_rows = batch64 * stride_kb + k_head * stride_kh + (first_new + rows64) * stride_kn
        k_lines = cached * stride_cb + k_head * stride_ch + line * stride_cn
        if HALF > 0:
            turned = tl.minimum(tl.maximum(turn + rows, 0), positions - 1).to(tl.int64)
            k = _rotated(k_base, k_rows, k_inside, dims, cos, sin, turned, stride_cos, HALF, INTERLEAVED)
        else:
            k = tl.load(k_base + k_rows[:, None] + dims[None, :], mask=k_inside, other=0.0)
        tl.store(k_cache + k_lines[:, None] + dims[None, :], k.to(k_cache.dtype.element_ty), mask=k_inside)
    else:
        v_head = (head - heads_kv).to(tl.int64)
        dims_v = tl.arange(0, BLOCK_DV)
        v_inside = taken[:, None] & (dims_v < DV)[None, :]
        v_rows = batch64 * stride_vb + v_head * stride_vh + (first_new + rows64) * stride_vn
        v_lines = cached * stride_wb + v_head * stride_wh + line * stride_wn
        v = tl.load(v_base + v_rows[:, None] + dims_v[None, :], mask=v_inside, other=0.0)
        tl.store(v_cache + v_lines[:, None] + dims_v[None, :], v, mask=v_inside)


_CALLS: Cache[Hashable, Callable[..., torch.Tensor | None]] = Cache(MOST_CALLS)
_BUILDS: Cache[Hashable, Callable[..., None]] = Cache(64)


def append(new: NewKeys, rotary: Rotary | None = None, queries: Queries | None = None) -> torch.Tensor | None:
    """Append, and rotate queries where they are given (which needs ``rotary``); checks nothing.

    Returns:
        The rotated queries, in the memory order of ``queries.q``; None where none are given.
    """
    key = _key(new, rotary, queries)
    call = _CALLS.get(key)
    if call is None:
        guard = device_guard(-1 if new.k.device.index is None else new.k.device.index)
        call = _CALLS[key] = guard(guard(_bind)(new, rotary, queries))
    return call(new, rotary, queries)


def _key(new: NewKeys, rotary: Rotary | None, queries: Queries | None) -> Hashable:
    """All that decides the launch."""
    tensors = [new.k, new.v, new.k_cache, new.v_cache]
    others: tuple[Hashable, ...] = ()
    if rotary is not None:
        cos = rotary.cos
        others = (cos.shape, cos.stride(), rotary.sin.stride(), cos.dtype, rotary.interleaved, rotary.seqlens is None)
    if queries is not None:
        tensors.append(queries.q)
        others = (*others, queries.q.dtype, queries.moving, queries.cu_seqlens_q is None, queries.max_seqlen_q)
    shapes = tuple([(one.shape, one.stride(), one.data_ptr() & 15) for one in tensors])
    table = new.page_table
    return (
        shapes, others, new.k.dtype, new.k.device, new.page, None if table is None else (table.shape, table.stride()),
        new.cache_batch_idx is None, new.cu_seqlens_new is None or (new.cu_seqlens_new.shape, new.max_seqlen_new),
    )  # fmt: skip


def _tensors(new: NewKeys, rotary: Rotary | None, queries: Queries | None) -> tuple[torch.Tensor | None, ...]:
    """The kernel's tensors that are only read by single elements, in its order, from ``cache_seqlens`` on."""
    cu_seqlens_q = None if queries is None else queries.cu_seqlens_q
    of_rotary = (None, None, None) if rotary is None else (rotary.cos, rotary.sin, rotary.seqlens)
    return (new.cache_seqlens, new.page_table, new.cache_batch_idx, new.cu_seqlens_new, cu_seqlens_q, *of_rotary)


def _bind(new: NewKeys, rotary: Rotary | None, queries: Queries | None) -> Callable[..., torch.Tensor | None]:
    """The launch for tensors of these shapes and strides."""
    k, v, k_cache, v_cache = new.k, new.v, new.k_cache, new.v_cache
    q = None if queries is None else queries.q
    (_, heads_kv, rows, width), width_v = k.shape, v.shape[3]
    batch = new.cache_seqlens.shape[0]
    block_d, block_dv = padded_head_dim(width), padded_head_dim(width_v)
    if new.cu_seqlens_new is not None:
        rows = new.max_seqlen_new
    heads, query_rows = 0, 0
    of_q: tuple[int, ...] = (0, 0, 0)
    of_rotated, shape, out_strides = of_q, of_q, of_q
    if q is not None and queries is not None:
        shape, out_strides = tuple(q.shape), output_strides(q, width)
        heads, query_rows = q.shape[1], q.shape[2] if queries.cu_seqlens_q is None else queries.max_seqlen_q
        of_q, of_rotated = q.stride()[:3], out_strides[:3]
        if queries.cu_seqlens_q is not None:
            of_q, of_rotated = (0, *of_q[1:]), (0, *of_rotated[1:])
    of_k, of_v = k.stride()[:3], v.stride()[:3]
    if new.cu_seqlens_new is not None:
        of_k, of_v = (0, *of_k[1:]), (0, *of_v[1:])
    strides = (*of_q, *of_k, *of_v, *of_rotated, *k_cache.stride()[:3], *v_cache.stride()[:3])
    most = max(rows, query_rows)
    block_r = min(max(1, _TILE // max(block_d, block_dv)), next_power_of_2(most))
    capacity = k_cache.shape[2] if new.page_table is None else new.page_table.shape[1] * new.page
    positions, half, stride_cos = (0, 0, 0) if rotary is None else (*rotary.cos.shape, rotary.cos.stride(0))
    stride_table = 0 if new.page_table is None else new.page_table.stride(0)
    numbers = (*strides, heads, heads_kv, rows, query_rows, capacity, k_cache.shape[0], positions, stride_table, stride_cos)
    moving, interleaved = queries is not None and queries.moving, rotary is not None and rotary.interleaved
    early = not INTERPRETING and can_start_early(k.device)
    constexprs = (width, width_v, block_d, block_dv, block_r, new.page, half, interleaved, moving, early)
    start = _build(new, rotary, queries, strides, numbers, constexprs)
    grid, tail = (cdiv(most, block_r) * batch * (heads + 2 * heads_kv), 1, 1), (*numbers, *constexprs)

    def call(new: NewKeys, rotary: Rotary | None, queries: Queries | None) -> torch.Tensor | None:
        q = None if queries is None else queries.q
        rotated = None if q is None else q.new_empty_strided(shape, out_strides)
        of_heads = (q, new.k, new.v, rotated, new.k_cache, new.v_cache)
        start(grid, *map(argument, of_heads), *map(argument, _tensors(new, rotary, queries)), *tail)
        return rotated

    return call


def _build(
    new: NewKeys,
    rotary: Rotary | None,
    queries: Queries | None,
    strides: tuple[int, ...],
    numbers: tuple[int, ...],
    constexprs: tuple[Any, ...],
) -> Callable[..., None]:
    heads = (None if queries is None else queries.q, new.k, new.v, new.k_cache, new.v_cache)
    pointers = [None if one is None else Pointer(one.dtype, one.data_ptr()) for one in heads]
    rotated = None if queries is None else Pointer(queries.q.dtype)
    others = [None if one is None else Pointer(one.dtype, 4) for one in _tensors(new, rotary, queries)]
    kinds = [None if one is None else (one.dtype, one.data_ptr()) for one in (*pointers, *others)]
    key = (tuple(kinds), stride_class(strides), new.k.device, constexprs)
    launch = _BUILDS.get(key)
    if launch is None:
        arguments = (*pointers[:3], rotated, *pointers[3:], *others, *numbers, *constexprs)
        build = Build(flashmoe_append_triton, arguments, num_warps=_WARPS, launch_pdl=bool(constexprs[-1]))
        launch = _BUILDS[key] = build.launch
    return launch
