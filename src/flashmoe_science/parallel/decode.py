"""Decoding with a cache that is spread over ranks: of N ranks, rank r has tokens r, r + N, r + 2N and so on of each sequence.

Each rank attends to its own keys. The results and their log-sum-exps go to all ranks, and are merged there (parts.py). Several
queries of a sequence see different numbers of this rank's keys: each is served as its own sequence, and these share the cache.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed import ProcessGroup

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.attention.call.append import Append
from flashmoe_science.ops.attention.call.checks import check_argument, check_table
from flashmoe_science.ops.attention.front.append import append_to_cache
from flashmoe_science.ops.attention.front.flash import check_dimensions, new_keys, packed_view
from flashmoe_science.ops.calls import autocast, needs_grad
from flashmoe_science.ops.explain import Explained, is_explaining
from flashmoe_science.parallel.agree import agreed, compares
from flashmoe_science.parallel.layout import process_group
from flashmoe_science.parallel.parts import DecodeWorkspace, Part, check_workspace, described, merge_parts
from flashmoe_science.serving import flash_attn_with_kvcache

Maybe = torch.Tensor | None
Caches = tuple[torch.Tensor, torch.Tensor, Maybe]  # of keys and of values, and the page table
_ROWS = "batch, tokens, heads, head_dim", 4


def context_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    group: object,
    cache_seqlens: torch.Tensor,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0,
    rotary_interleaved: bool = True,
    s_aux: torch.Tensor | None = None,
    kernel: str | None = None,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """``flash_attn_with_kvcache``, causal, with a cache spread over N ranks: token i is on rank i % N, there at place i // N.
    Every rank calls it, with the same arguments except its caches and its ``page_table``.

    The result is that of one cache up to rounding, with the same bits on every rank: each rank's part is rounded to the dtype
    of q, and the parts are merged in fp32 in the order of the ranks. Nothing waits for the host. There is no gradient.

    Args:
        q: [batch, queries, heads, head_dim], all heads, of the last few tokens of each sequence: each query reads the keys
            again.
        k_cache, v_cache: this rank's, [batch, capacity, heads_kv, ...], or with ``page_table`` [pages, rows, heads_kv, ...].
        k, v: [batch, queries, heads_kv, ...], the tokens of this step: each is written on its rank, behind ``cache_seqlens``.
        group: a ProcessGroup or a 1-D DeviceMesh.
        cache_seqlens: int32 [batch], the tokens that each sequence has on all ranks together, without k and v.
        rotary_cos, rotary_sin, rotary_interleaved: as of ``flash_attn_with_kvcache``, by the position in the whole sequence.
        page_table: int32 [batch, most pages], of this rank's pages.
        softmax_scale, softcap, kernel: as of ``flash_attn_with_kvcache``.
        s_aux: [heads], a learned sink. It counts once.
        workspace: exchanges and merges the parts in one launch between GPUs of one host, in place of a collective before the
            merge. The bits are the same.

    Returns:
        out in the shape of q with the width of v_cache; zeros where a query sees no token.

    Raises:
        TypeError, ValueError: an argument that is not allowed. On the CPU, and with FLASHMOE_CHECK=1 in the environment, each
            call compares the arguments of all ranks, and all raise; else a rank may raise alone, and the others wait until the
            group's time limit.
    """
    ranks, compare = process_group(group), compares(q)
    try:
        with agreed(ranks, compare) as facts:
            _check(q, cache_seqlens, k_cache, v_cache, k, v)
            _check_cache(q, k_cache, page_table, s_aux)
            (q,) = autocast((q,)) or (q,)
            batch, queries, heads, _ = q.shape
            part = Part.of(batch * queries * heads, v_cache.shape[3], q.dtype)
            if workspace is not None:
                check_workspace(workspace, ranks, part, q.dtype)
            if compare:
                _check_lengths(cache_seqlens, k_cache, page_table, 0 if k is None else queries, ranks)
                facts |= {
                    "the shape of q": tuple(q.shape), "q.dtype": str(q.dtype), "k is None": k is None,
                    "s_aux is None": s_aux is None, "the heads of k_cache": tuple(k_cache.shape[2:]),
                    "the heads of v_cache": tuple(v_cache.shape[2:]), "softmax_scale": softmax_scale, "softcap": softcap,
                    "rotary_cos is None": rotary_cos is None, "rotary_interleaved": rotary_interleaved,
                    "workspace is None": workspace is None, "cache_seqlens": cache_seqlens.tolist(),
                }  # fmt: skip
            of, caches, starts, rows = (ranks.rank(), ranks.size()), (k_cache, v_cache, page_table), None, None
            if queries == 1:
                lengths, k, v, starts = _own(cache_seqlens, k, v, caches, rotary_cos is not None, *of)
            else:
                rotary = (rotary_cos, rotary_sin, rotary_interleaved)
                q, lengths, page_table, rows = _as_sequences(q, cache_seqlens, k, v, caches, rotary, *of)
                k = v = rotary_cos = rotary_sin = None
            out, lse = flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, cache_seqlens=lengths, cu_seqlens_k_new=starts, page_table=page_table,
                softmax_scale=softmax_scale, softcap=softcap, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                rotary_seqlens=None if rotary_cos is None else cache_seqlens, rotary_interleaved=rotary_interleaved,
                cache_batch_idx=rows, s_aux=s_aux if ranks.rank() == 0 else None, kernel=kernel, return_softmax_lse=True,
            )  # fmt: skip
    except Explained as found:
        reason = f"{found.decision.reason}; {described(ranks, workspace, part)}"
        raise Explained(replace(found.decision, reason=reason)) from None
    return merge_parts(ranks, workspace, out, lse).view(batch, queries, heads, out.shape[-1])


def _as_sequences(
    q: torch.Tensor, cache_seqlens: torch.Tensor, k: Maybe, v: Maybe, caches: Caches, rotary: tuple[Maybe, Maybe, bool],
    rank: int, ranks: int,
) -> tuple[torch.Tensor, torch.Tensor, Maybe, Maybe]:  # fmt: skip
    """(q, lengths, page_table, cache_batch_idx) of a sequence for each query, rotated, after the new tokens are written."""
    k_cache, v_cache, table = caches
    (batch, queries), device = q.shape[:2], q.device
    row = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(queries)
    place = torch.arange(queries, dtype=torch.int32, device=device) - (queries if k is None else 0)
    positions = (cache_seqlens[:, None] + place).flatten()  # [batch * queries], in the whole sequence
    pages, rows = (None, row) if table is None else (table[row.long()], None)
    q, (cos, sin, interleaved) = q.flatten(0, 1)[:, None], rotary
    if (new := new_keys(k, v, False, cos, interleaved)) is not None:
        k, v = (one.transpose(1, 2).flatten(0, 1)[:, None] for one in new)
        lengths, k, v, starts = _own(positions, k, v, caches, True, rank, ranks)
        assert k is not None
        assert v is not None
        append = Append(
            k_cache.transpose(1, 2), v_cache.transpose(1, 2), packed_view(k), packed_view(v), q.transpose(1, 2), lengths, pages,
            rows, starts, None, cos, sin, None if cos is None else positions, interleaved,
        )  # fmt: skip
        q = append_to_cache(append)[0].transpose(1, 2)
    return q, _lengths(positions + 1, rank, ranks).clamp(min=0), pages, rows


def _lengths(lengths: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """How many of each sequence's tokens are on this rank."""
    return (lengths + (ranks - 1 - rank)) // ranks


def _own(
    cache_seqlens: torch.Tensor, k: Maybe, v: Maybe, caches: Caches, packed: bool, rank: int, ranks: int,
) -> tuple[torch.Tensor, Maybe, Maybe, Maybe]:  # fmt: skip
    """The lengths on this rank; k, v and ``cu_seqlens_k_new`` of its new tokens, unless they are written already (never if
    ``packed``). Sequences whose new token is this rank's come first; the rest is not read."""
    if _has_kernels(cache_seqlens) and len(cache_seqlens):
        from flashmoe_science.parallel.own_tokens import can_write, own_tokens, write_own  # it brings Triton

        if k is None or v is None or packed or not can_write(k, v, *caches):
            return own_tokens(cache_seqlens, k, v, rank, ranks)
        return write_own(cache_seqlens, k, v, *caches, rank, ranks), None, None, None
    lengths = _lengths(cache_seqlens, rank, ranks)
    if k is None or v is None:
        return lengths, k, v, None
    mine = cache_seqlens % ranks == rank
    order = mine.argsort(descending=True, stable=True)
    starts = torch.cat((mine.new_zeros(1), mine)).cumsum(0, dtype=torch.int32)
    return lengths, k[order, 0], v[order, 0], starts


def _has_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda and not TRITON_MISSING and not is_explaining()


def _check(q: torch.Tensor, cache_seqlens: torch.Tensor, *others: torch.Tensor | None) -> None:
    names = ("q", "k_cache", "v_cache", "k", "v")
    given = [(name, one) for name, one in zip(names, (q, *others), strict=True) if one is not None or name not in names[3:]]
    check_dimensions(tuple(given), (_ROWS,) * len(given))
    if q.shape[1] < 1:
        raise ValueError("q has 0 queries a sequence; it must have at least 1")
    if cache_seqlens is None:
        raise TypeError("cache_seqlens is None; it must be the tokens that each sequence has on all ranks together")
    check_table(cache_seqlens, "cache_seqlens", (q.shape[0],), q)
    for name, new, cache in zip(names[3:], others[2:], others[:2], strict=True):
        if new is None or cache is None:
            continue
        if (wanted := (*q.shape[:2], *cache.shape[2:])) != tuple(new.shape) or new.device != q.device:
            raise ValueError(f"{name} has shape {tuple(new.shape)} on {new.device}; it must be {wanted} on {q.device}")
    if needs_grad(q, *others):
        raise ValueError("an input requires gradients; context_decode has none")


def _check_cache(q: torch.Tensor, k_cache: torch.Tensor, page_table: Maybe, s_aux: Maybe) -> None:
    """Raise for what only one rank uses, or what gives its capacity."""
    check_table(page_table, "page_table", (q.shape[0], None), q)
    if s_aux is not None:
        check_argument(s_aux, "s_aux", (q.shape[2],), q, (torch.float32, q.dtype))


def _check_lengths(
    cache_seqlens: torch.Tensor, k_cache: torch.Tensor, page_table: Maybe, new: int, ranks: ProcessGroup
) -> None:
    """Raise unless this rank has room for its tokens of each sequence, with its new one."""
    room = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    for n, length in enumerate(cache_seqlens.tolist()):
        if length < 0:
            raise ValueError(f"cache_seqlens is {length} for sequence {n}; it must be at least 0")
        if (own := (length + new + ranks.size() - 1 - ranks.rank()) // ranks.size()) > room:
            tokens = f"cache_seqlens is {length} for sequence {n}, of which rank {ranks.rank()} of {ranks.size()} has {own}"
            raise ValueError(f"{tokens}{', with the new' if new else ''}; it has room for {room}")
