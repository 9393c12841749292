"""The operator ``flashmoe::kv_cache_append``: new keys and values into a cache, with rotary embeddings of them and of queries.

It changes the caches in place and returns the rotated queries and the lengths after it. Our kernel (append_triton.py) serves it
on an NVIDIA GPU, PyTorch's operators (append_fallback.py) elsewhere. It has no gradient: neither has FlashAttention's.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import cast

import torch

from flashmoe_science.hardware.probe import gpu_of
from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.attention.call.inputs import output_strides
from flashmoe_science.ops.attention.call.modes_spec import check_table
from flashmoe_science.ops.attention.front.append_fallback import NewRows, Rotary, Slots, append, rotate_queries
from flashmoe_science.ops.plan import is_plain

_LIBRARY = torch.library.Library("flashmoe", "FRAGMENT")
_LIBRARY.define(
    "kv_cache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor q, Tensor cache_seqlens, "
    "Tensor? page_table=None, Tensor? cache_batch_idx=None, Tensor? cu_seqlens_k_new=None, Tensor? cu_seqlens_q=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? rotary_seqlens=None, bool rotary_interleaved=True, "
    "bool one_position=False, SymInt max_seqlen_q=0) -> (Tensor q_rotated, Tensor seqlens)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def append_to_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    one_position: bool = False,
    max_seqlen_q: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write k and v, rotated, behind the first ``cache_seqlens`` of each sequence's cache, in place.

    Args:
        k_cache, v_cache: [caches, heads_kv, capacity, ...] or [pages, heads_kv, page, ...] views.
        k, v: [batch, heads_kv, new, ...] views of the caches' dtype, or packed [1, heads_kv, total, ...] by cu_seqlens_k_new.
        q: [batch, heads, seqlen_q, head_dim], or packed by cu_seqlens_q; it is only read.
        cache_seqlens: int32 [batch], the lengths before. None is checked against the capacity: that would wait for the GPU.
        max_seqlen_q: of packed queries.
        rotary_cos, rotary_sin: [positions, half of the rotated width]; key i of a sequence is at its ``rotary_seqlens`` (or
            ``cache_seqlens``) + i, and so is query i, or every query at + 0 with ``one_position``.

    Returns:
        The rotated q (q itself without rotary), and int32 [batch], the lengths after.

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line.
    """
    check_append(k_cache, v_cache, k, v, q, cache_seqlens, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens)
    arguments = (
        k_cache, v_cache, k, v, q, cache_seqlens, page_table, cache_batch_idx, cu_seqlens_k_new, cu_seqlens_q, rotary_cos,
        rotary_sin, rotary_seqlens, rotary_interleaved, one_position, max_seqlen_q,
    )  # fmt: skip
    if torch.compiler.is_compiling() or not (is_plain(k_cache, v_cache, q) and is_plain(k, v, cache_seqlens)):
        rotated, seqlens = _OPERATOR(*arguments)
    else:
        rotated, seqlens = _forward(*arguments)
    return (q if rotary_cos is None else rotated), seqlens


def check_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_k_new: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rotary_seqlens: torch.Tensor | None,
) -> None:
    """Raise unless ``append_to_cache`` can take these.

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line.
    """
    batch = cache_seqlens.shape[0]
    for name, new, held, cache_name in (("k", k, k_cache, "k_cache"), ("v", v, v_cache, "v_cache")):
        if new.dtype != held.dtype:
            raise TypeError(f"{name} has dtype {new.dtype} and {cache_name} has {held.dtype}; they must be the same")
        rows = 1 if cu_seqlens_k_new is not None else batch
        sizes = (rows, held.shape[1], k.shape[2], held.shape[3])
        if new.shape != sizes:
            raise ValueError(
                f"{name} has (batch, heads, tokens, head_dim) {tuple(new.shape)}; beside {cache_name} and k it must be {sizes}"
            )
        if new.device != held.device:
            raise ValueError(f"{name} is on {new.device} and {cache_name} on {held.device}; they must be on the same device")
        if held.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{cache_name} requires gradients; it is written in place, so it must not")
    if torch.is_grad_enabled():
        for name, one in (("k", k), ("v", v), *((("q", q),) if cos is not None else ())):
            if one.requires_grad:
                raise ValueError(f"{name} requires gradients, and an append has none: call it under torch.no_grad()")
    check_table(cu_seqlens_k_new, "cu_seqlens_k_new", (batch + 1,), k_cache)
    check_table(rotary_seqlens, "rotary_seqlens", (batch,), k_cache)
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin: one is given and the other is None; both must be given, or neither")
    if cos is not None and sin is not None:
        _check_rotary(cos, sin, q)


def _check_rotary(cos: torch.Tensor, sin: torch.Tensor, q: torch.Tensor) -> None:
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if table.dim() != 2 or table.shape != cos.shape:
            raise ValueError(f"{name} has shape {tuple(table.shape)}; both must be [positions, half of the rotated width]")
        if table.dtype != cos.dtype:
            raise TypeError(f"rotary_sin has dtype {sin.dtype} and rotary_cos has {cos.dtype}; they must be the same")
        if not table.is_floating_point() or table.device != q.device:
            raise ValueError(f"{name} is {table.dtype} on {table.device}; it must be floating, on {q.device}")
    width = 2 * cos.shape[1]
    if width % 16 != 0 or width > q.shape[3]:
        raise ValueError(
            f"rotary_cos rotates {width} dimensions; it must be a multiple of 16, of at most head_dim {q.shape[3]}"
        )


@torch.no_grad()
def _forward(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    one_position: bool = False,
    max_seqlen_q: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator on CPU and CUDA: the rotated queries, empty where nothing is rotated, and the lengths after."""
    rotary = None
    if rotary_cos is not None:
        assert rotary_sin is not None
        rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    if cu_seqlens_k_new is None:
        seqlens = cache_seqlens + k.shape[2]
    else:
        seqlens = cache_seqlens + (cu_seqlens_k_new[1:] - cu_seqlens_k_new[:-1])
    if gpu_of(q) is not None and not TRITON_MISSING:
        rotated = _by_kernel(
            NewRows(k, v, cu_seqlens_k_new), k_cache, v_cache, Slots(cache_seqlens, page_table, cache_batch_idx), rotary, q,
            cu_seqlens_q, max_seqlen_q, one_position,
        )  # fmt: skip
        return q.new_empty(0) if rotated is None else rotated, seqlens
    append(k_cache, v_cache, NewRows(k, v, cu_seqlens_k_new), Slots(cache_seqlens, page_table, cache_batch_idx), rotary)
    if rotary is None:
        return q.new_empty(0), seqlens
    out = q.new_empty_strided(q.shape, output_strides(q, q.shape[3]))
    return out.copy_(rotate_queries(q, cu_seqlens_q, rotary, cache_seqlens, one_position)), seqlens


@cache
def _kernel() -> ModuleType:
    """The module of the kernel, which brings Triton: an import of this one need not wait for it."""
    from flashmoe_science.ops.attention.device import append_triton

    return append_triton


def _by_kernel(
    new: NewRows,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: Slots,
    rotary: Rotary | None,
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    one_position: bool,
) -> torch.Tensor | None:
    """Append by our kernel: the rotated queries, None where nothing is rotated."""
    kernel, most_new = _kernel(), 0
    if new.cu_seqlens is not None:  # no sequence appends more than all together
        most_new = max_seqlen_q if new.cu_seqlens is cu_seqlens_q else new.k.shape[2]
    page = 0 if slots.page_table is None else k_cache.shape[2]
    keys = kernel.NewKeys(
        new.k, new.v, k_cache, v_cache, slots.seqlens, slots.page_table, page, slots.batch_idx, new.cu_seqlens, most_new
    )
    if rotary is None:
        result = kernel.append(keys)
    else:
        queries = kernel.Queries(q, not one_position, cu_seqlens_q, max_seqlen_q)
        result = kernel.append(keys, rotary, queries)
    return cast("torch.Tensor | None", result)


def _fake(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    *rest: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes, strides and dtypes of ``_forward`` without the work."""
    seqlens = torch.empty_like(cache_seqlens)
    if rotary_cos is None:
        return q.new_empty(0), seqlens
    return q.new_empty_strided(q.shape, output_strides(q, q.shape[3])), seqlens


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("kv_cache_append", _forward, _key)
torch.library.register_fake("flashmoe::kv_cache_append", _fake, lib=_LIBRARY)
_OPERATOR = torch.ops.flashmoe.kv_cache_append.default
