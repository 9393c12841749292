"""Decoding with a cache that is spread over ranks: of N ranks, rank r has tokens r, r + N, r + 2N and so on of each sequence.

Each rank attends to its own keys. The results, with their log-sum-exps, are sent to all ranks in one message and merged there.
"""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.ops.attention.call.checks import check_table
from flashmoe_science.ops.attention.front.flash import check_dimensions
from flashmoe_science.ops.attention.front.merge import merged
from flashmoe_science.ops.calls import needs_grad
from flashmoe_science.parallel.agree import agreed, compares
from flashmoe_science.parallel.layout import process_group
from flashmoe_science.parallel.transport import gathered
from flashmoe_science.serving import flash_attn_with_kvcache

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
) -> torch.Tensor:
    """``flash_attn_with_kvcache`` of one query a sequence, with a cache that is spread over N ranks: token i is on
    rank i % N, there at place i // N. Every rank calls it, with the same arguments but for its caches and its ``page_table``.

    The result is that of one cache but for rounding, and has the same bits on every rank: each rank's part is rounded to the
    dtype of q, and the parts are merged in fp32 in the order of the ranks. Nothing waits for the host. It has no gradient.

    Args:
        q: [batch, 1, heads, head_dim], all heads.
        k_cache, v_cache: this rank's, [batch, capacity, heads_kv, ...], or with ``page_table`` [pages, rows, heads_kv, ...].
        k, v: [batch, 1, heads_kv, ...], the token of this step: it is written on its rank, behind ``cache_seqlens`` tokens.
        group: a ProcessGroup or a 1-D DeviceMesh.
        cache_seqlens: int32 [batch], the tokens that each sequence has on all ranks together, without k and v.
        rotary_cos, rotary_sin, rotary_interleaved: as of ``flash_attn_with_kvcache``, by the position in the whole sequence.
        page_table: int32 [batch, most pages], of this rank's pages.
        softmax_scale, softcap, kernel: as of ``flash_attn_with_kvcache``.
        s_aux: [heads], a learned sink. It counts once.

    Returns:
        out in the shape of q with the width of v_cache; zeros where a sequence has no token.

    Raises:
        TypeError, ValueError: an argument that is not allowed. On the CPU, and with FLASHMOE_CHECK=1 in the environment, each
            call compares the arguments of all ranks, and all raise; else a rank may raise alone, and others wait for it until
            the time limit of the group.
    """
    ranks, compare = process_group(group), compares(q)
    with agreed(ranks, compare) as facts:
        _check(q, cache_seqlens, k_cache, v_cache, k, v)
        facts |= {
            "the shape of q": tuple(q.shape), "q.dtype": str(q.dtype), "k is None": k is None, "s_aux is None": s_aux is None,
            "the heads of k_cache": tuple(k_cache.shape[2:]), "the heads of v_cache": tuple(v_cache.shape[2:]),
            "softmax_scale": softmax_scale, "softcap": softcap, "rotary_cos is None": rotary_cos is None,
            "rotary_interleaved": rotary_interleaved, "cache_seqlens": cache_seqlens.tolist() if compare else None,
        }  # fmt: skip
        rank, count = ranks.rank(), ranks.size()
        new: dict[str, Any] = {"k": k, "v": v}
        if k is not None and v is not None:
            # The sequences whose new token is this rank's come first; what follows is not read.
            mine = cache_seqlens % count == rank
            order = mine.argsort(descending=True, stable=True)
            starts = torch.cat((mine.new_zeros(1), mine)).cumsum(0, dtype=torch.int32)
            new = {"k": k[order, 0], "v": v[order, 0], "cu_seqlens_k_new": starts}
        if rotary_cos is not None:
            new["rotary_seqlens"] = cache_seqlens
        out, lse = flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=(cache_seqlens + (count - 1 - rank)) // count, page_table=page_table,
            softmax_scale=softmax_scale, softcap=softcap, rotary_interleaved=rotary_interleaved,
            rotary_cos=rotary_cos, rotary_sin=rotary_sin, s_aux=s_aux if rank == 0 else None, kernel=kernel,
            return_softmax_lse=True, **new,
        )  # fmt: skip
    wide = torch.promote_types(out.dtype, lse.dtype)
    part = torch.cat((out.to(wide), lse.to(wide).transpose(1, 2)[..., None]), -1)  # [batch, 1, heads, head_dim + 1]
    (parts,) = gathered(ranks, part)
    parts = parts.unflatten(0, (count, -1))
    return merged(parts[..., :-1].unbind(), parts[..., -1].unbind())[0].to(out.dtype)


def _check(q: torch.Tensor, cache_seqlens: torch.Tensor, *others: torch.Tensor | None) -> None:
    names = ("q", "k_cache", "v_cache", "k", "v")
    given = [(name, one) for name, one in zip(names, (q, *others), strict=True) if one is not None]
    check_dimensions(tuple(given), (_ROWS,) * len(given))
    if q.shape[1] != 1:
        raise ValueError(f"q has {q.shape[1]} queries a sequence; it must have 1")
    if cache_seqlens is None:
        raise TypeError("cache_seqlens is None; it must be the tokens that each sequence has on all ranks together")
    check_table(cache_seqlens, "cache_seqlens", (q.shape[0],), q)
    if needs_grad(q, *others):
        raise ValueError("an input requires gradients; context_decode has none")
