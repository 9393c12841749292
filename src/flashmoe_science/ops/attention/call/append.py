"""The arguments of an append to a cache of keys and values, and their checks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashmoe_science.ops.attention.call.checks import check_contiguous, check_table
from flashmoe_science.ops.checks import check_device, checked_tensor


class Append(NamedTuple):
    """The arguments of the operator ``flashmoe::kv_cache_append``, in its order.

    k_cache, v_cache: [caches, heads_kv, capacity, ...] or [pages, heads_kv, page, ...] views.
    k, v: [batch, heads_kv, new, ...] views of the caches' dtype, or packed [1, heads_kv, total, ...] with cu_seqlens_k_new.
    q: [batch, heads, seqlen_q, head_dim], or packed by cu_seqlens_q; it is only read.
    cache_seqlens: int32 [batch], the lengths before.
    page_table, cache_batch_idx: of Tensors.
    cu_seqlens_k_new, cu_seqlens_q: int32 [batch + 1], of packed new keys and of packed queries.
    rotary_cos, rotary_sin: [positions, half of the rotated width]; key i of a sequence has position ``rotary_seqlens`` (or
        ``cache_seqlens``) + i; so has query i, or + 0 with ``one_position``.
    rotary_interleaved: pairs (0, 1), (2, 3)... are rotated; else (i, i + half).
    max_seqlen_q: of packed queries.
    table_name: what the caller calls ``page_table``.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    cache_seqlens: torch.Tensor
    page_table: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cu_seqlens_k_new: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    rotary_seqlens: torch.Tensor | None = None
    rotary_interleaved: bool = True
    one_position: bool = False
    max_seqlen_q: int = 0
    table_name: str = "page_table"

    @property
    def page(self) -> int:
        """Rows of a page, 0 for a contiguous cache."""
        return 0 if self.page_table is None else self.k_cache.shape[2]

    @property
    def max_seqlen_new(self) -> int:
        """The most new keys of a sequence; if packed, at most all of them."""
        if self.cu_seqlens_k_new is not None and self.cu_seqlens_k_new is self.cu_seqlens_q:
            return self.max_seqlen_q
        return self.k.shape[2]


def check_append(a: Append) -> None:
    """Raise TypeError, ValueError unless the append can be made."""
    batch = a.cache_seqlens.shape[0]
    for name, new, cache, cache_name in (("k", a.k, a.k_cache, "k_cache"), ("v", a.v, a.v_cache, "v_cache")):
        if new.dtype != cache.dtype:
            raise TypeError(f"{name} has dtype {new.dtype} and {cache_name} has {cache.dtype}; they must be the same")
        rows = 1 if a.cu_seqlens_k_new is not None else batch
        sizes = (rows, cache.shape[1], a.k.shape[2], cache.shape[3])
        if new.shape != sizes:
            have = f"{name} has (batch, heads, tokens, head_dim) {tuple(new.shape)}"
            raise ValueError(f"{have}; with {cache_name} and k it must be {sizes}")
        check_device(name, new, cache_name, cache)
        if cache.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{cache_name} requires gradients; it is written in place, so it must not")
    if torch.is_grad_enabled():
        for name, one in (("k", a.k), ("v", a.v), *((("q", a.q),) if a.rotary_cos is not None else ())):
            if one.requires_grad:
                raise ValueError(f"{name} requires gradients, and an append has none: call it under torch.no_grad()")
    check_table(a.cu_seqlens_k_new, "cu_seqlens_k_new", (batch + 1,), a.k_cache)
    check_table(a.rotary_seqlens, "rotary_seqlens", (batch,), a.k_cache)
    if (a.rotary_cos is None) != (a.rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin: one is given and the other is None; both must be given, or neither")
    if a.rotary_cos is not None and a.rotary_sin is not None:
        _check_rotary(a.rotary_cos, a.rotary_sin, a.q)


def _check_rotary(cos: torch.Tensor, sin: torch.Tensor, q: torch.Tensor) -> None:
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        checked_tensor(name, table)
        if table.dim() != 2 or table.shape != cos.shape:
            raise ValueError(f"{name} has shape {tuple(table.shape)}; both must be [positions, half of the rotated width]")
        if table.dtype != cos.dtype:
            raise TypeError(f"rotary_sin has dtype {sin.dtype} and rotary_cos has {cos.dtype}; they must be the same")
        if not table.is_floating_point() or table.device != q.device:
            raise ValueError(f"{name} is {table.dtype} on {table.device}; it must be floating, on {q.device}")
        check_contiguous(table, name)
    width = 2 * cos.shape[1]
    if width % 16 != 0 or width > q.shape[3]:
        raise ValueError(
            f"rotary_cos rotates {width} dimensions; it must be a multiple of 16, of at most head_dim {q.shape[3]}"
        )
