"""FlashAttention-3's functions for serving: packed sequences of any lengths, and a cache of keys and values.

Names, order and meaning of the arguments are FlashAttention-3's; FlashAttention-2's ``block_table`` and ``alibi_slopes``, a
learned sink and ``kernel`` are keywords. No call waits for a GPU, and a CUDA graph can capture calls and replay them with other
lengths. Calls that are not served are refused in words. Impossible lengths and pages are refused on the CPU, and on a GPU with
FLASHMOE_CHECK=1 in the environment: each call then launches a check and waits for it. PyTorch's operators serve the CPU, inputs
that require gradients, fp64, dropout and wider heads. Under torch.autocast queries, keys and values are cast, new ones to the
dtypes of their caches.
"""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.ops.attention.call.append import Append
from flashmoe_science.ops.attention.call.checks import check_table
from flashmoe_science.ops.attention.call.lengths import Lengths
from flashmoe_science.ops.attention.call.packed import used_rows
from flashmoe_science.ops.attention.call.tensors import ALL_KEYS, DTYPES, Options, Tensors
from flashmoe_science.ops.attention.front.append import append_to_cache
from flashmoe_science.ops.attention.front.flash import (
    BLOCK_NAMES,
    CACHE_NAMES,
    USED_NAMES,
    VARLEN_NAMES,
    autocast_beside,
    check_dimensions,
    checked_cap,
    concat_qv,
    dequantised_query,
    lengths_of,
    mask_of,
    max_seqlen,
    new_keys,
    one_table,
    packed_view,
    queries_of,
    refuse_other_order,
    rows_of_table,
    slopes_of,
    whole_cache,
    window_of,
    with_chunks,
)
from flashmoe_science.ops.attention.front.lengths import refuse_lengths
from flashmoe_science.ops.attention.front.operator import append_and_attend, attend, attend_with_dropout, cached_call
from flashmoe_science.ops.attention.problem import KEY_CLASS
from flashmoe_science.ops.calls import autocast
from flashmoe_science.ops.checks import check_flag

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]

_PACKED, _ROWS, _PAGES = (
    ("tokens, heads, head_dim", 3),
    ("batch, tokens, heads, head_dim", 4),
    ("pages, rows, heads, head_dim", 4),
)
_NOTHING_NEW = (None,) * 5


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    block_table: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    dropout_p: float = 0,
    kernel: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attention of packed sequences of any lengths, one after another, with FlashAttention-3's signature and semantics.

    Args:
        q: [total_q, heads, head_dim]; k and v: [total_k, heads_kv, ...], or with ``block_table`` [pages, rows, heads_kv, ...].
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], where each sequence begins, and the total. The second may be None with
            ``block_table`` and ``seqused_k``. Rows after that total give zeros, a log-sum-exp of -inf and gradients of 0.
        max_seqlen_q, max_seqlen_k: no sequence is longer.
        seqused_q, seqused_k: int32 [batch], how many of each sequence's queries and keys take part; other queries give zeros.
        softmax_scale: of the scores; head_dim ** -0.5 by default.
        causal: the last query of a sequence sees its last key; a query that sees no key gets zeros.
        q_descale, k_descale, v_descale: fp32 [batch, heads_kv], of e4m3 tensors. The output is then bf16 or q's dtype.
        window_size: query i sees keys i + seqlen_k - seqlen_q - left to ... + right, both included; -1 for no limit.
        attention_chunk: above 0, queries see only keys in their own chunk of that many positions.
        softcap: scores s become softcap * tanh(s / softcap); 0.0 for none.
        num_splits: the number of splits of the keys. 1: the result does not depend on the batch. 0: our choice; the last bits
            of a sequence's result may depend on the other lengths. Equal calls give equal bits.
        return_attn_probs: also return the log-sum-exp, and with ``dropout_p`` the weights, as FlashAttention-2.
        block_table: int32 [batch, most pages], the pages of each sequence. Entries past its length are never followed.
        alibi_slopes: fp32 [heads] or [batch, heads]: adds -slope * |i + seqlen_k - seqlen_q - j| to the scores.
        s_aux: [heads], a learned logit in each row's softmax, without a value (a sink); the log-sum-exp includes it.
        dropout_p: above 0, served by PyTorch's operators; the log-sum-exp is that without dropout.
        kernel: serve by this kernel or raise.
        deterministic: equal calls give equal bits in the gradients too, by our backward; else the call is refused.
        pack_gqa, sm_margin: accepted and without effect.
        qv: [total_q, heads, head_dim_v], a second query against v: the scores are (q k^T + qv v^T) * softmax_scale, by default
            (head_dim + head_dim_v) ** -0.5. k and v are copied into one tensor for it.

    Returns:
        out [total_q, heads, head_dim_v]; with ``return_attn_probs`` (out, lse [heads, total_q] fp32, fp64 for fp64), and
        with ``dropout_p`` also the weights [batch, heads, longest query, longest key], as of ``flash_attn_func``.

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line.
        NotImplementedError: an option that is not served.
    """
    store = None
    cu_keys = cu_seqlens_k if block_table is None else None
    if (
        not torch.compiler.is_compiling()
        and qv is q_descale is seqused_q is None
        and (seqused_k if cu_keys is None else cu_keys) is not None
        and max_seqlen_q.__class__ is max_seqlen_k.__class__ is attention_chunk.__class__ is int
        and window_size.__class__ is tuple
        and attention_chunk == 0 <= max_seqlen_k
        and dropout_p == 0.0
    ):
        given = (
            q, k, v, cu_seqlens_q, cu_keys, seqused_k, block_table, None, None, s_aux, alibi_slopes, None, None, k_descale,
            v_descale, *_NOTHING_NEW,
        )  # fmt: skip
        # One launch serves a class of ``max_seqlen_k``, which decides nothing but the number of splits.
        most = (max_seqlen_q, -(-max_seqlen_k // KEY_CLASS))
        others = ("varlen", causal, softcap, num_splits, return_attn_probs, deterministic, kernel, *most, *window_size)
        found, store = cached_call(given, ALL_KEYS, others, softmax_scale)
        if found is not None:
            return found if return_attn_probs else found[0]  # type: ignore[return-value]
    refuse_other_order(seqused_q)
    mask = mask_of(causal)
    check_flag(return_attn_probs, "return_attn_probs")
    left, right = window_of(window_size, causal)
    kind = _PACKED if block_table is None else _PAGES
    check_dimensions((("q", q), ("k", k), ("v", v)), (_PACKED, kind, kind))
    if (cast := autocast((q, k, v, qv))) is not None:
        (q, k, v, qv), store = cast, None
    if q.dtype not in DTYPES:
        store = None  # the queries of the launch are others
    q, k_descale = dequantised_query(q, q_descale, k_descale)
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q is None; it must be an int32 tensor of batch + 1 numbers")
    check_table(cu_seqlens_q, "cu_seqlens_q", (None,), q)
    check_table(block_table, "block_table", (None, None), q)
    q, k = concat_qv(q, k, v, qv)
    max_q, total_q = max_seqlen(max_seqlen_q, "max_seqlen_q", q.shape[0]), q.shape[0]
    used = None
    if seqused_q is not None:
        check_table(seqused_q, "seqused_q", (cu_seqlens_q.shape[0] - 1,), q)
        starts, sizes = (cu_seqlens_q, cu_seqlens_q), (total_q, total_q, max_q)
        refuse_lengths(Lengths(*starts, seqused_q, *(None,) * 5, *sizes, names=USED_NAMES))
        used = used_rows(cu_seqlens_q, seqused_q, total_q)
        q, cu_seqlens_q = q.index_select(0, used.source), used.cu_seqlens
    if block_table is not None:
        if seqused_k is None and cu_seqlens_k is not None:
            check_table(cu_seqlens_k, "cu_seqlens_k", (cu_seqlens_q.shape[0],), q)
            refuse_lengths(Lengths(None, cu_seqlens_k, tokens_k=block_table.numel() * k.shape[1]))
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        cu_seqlens_k = None
    max_k = max_seqlen(max_seqlen_k, "max_seqlen_k", k.shape[0] if block_table is None else block_table.shape[1] * k.shape[1])
    keys, values = (packed_view(one) if block_table is None else one.transpose(1, 2) for one in (k, v))
    tensors = Tensors(
        packed_view(q), keys, values, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, sinks=s_aux,
        alibi_slopes=slopes_of(alibi_slopes, cu_seqlens_q.shape[0] - 1), k_scale=k_descale, v_scale=v_descale,
    )  # fmt: skip
    check_flag(deterministic, "deterministic")
    options = Options(
        mask, return_attn_probs, kernel, left, right, checked_cap(softcap), num_splits, max_q, max_k, deterministic,
        tokens_first=True, names=VARLEN_NAMES,
    )  # fmt: skip
    tensors = with_chunks(tensors, options, attention_chunk)
    weights = None
    if dropout_p != 0.0:
        out, lse, weights = attend_with_dropout(tensors, options, softmax_scale, dropout_p)
    else:
        out, lse = attend(tensors, options, softmax_scale, store=store)
    if used is not None:
        out = torch.where(used.used[:, None, None], out.index_select(0, used.place), 0.0)
        lse = None if lse is None else torch.where(used.used, lse.index_select(1, used.place), -torch.inf)
    if lse is None:
        return out
    return (out, lse) if weights is None else (out, lse, weights)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of new queries to a cache of keys and values, with FlashAttention-3's signature and semantics.

    With ``k`` and ``v`` the cache grows first, in place: they are written behind the first ``cache_seqlens`` of each sequence
    and count in this call (``cache_seqlens`` itself is not changed). What exceeds the capacity is refused on the CPU and with
    FLASHMOE_CHECK=1, else not written.

    Args:
        q: [batch, seqlen_q, heads, head_dim], or [total_q, heads, head_dim] with ``cu_seqlens_q`` and ``max_seqlen_q``.
        k_cache, v_cache: [caches, capacity, heads_kv, ...], or with ``page_table`` [pages, rows, heads_kv, ...], any number of
            rows. fp16, bf16 or fp32 as q, or e4m3.
        k, v: [batch, new, heads_kv, ...], or packed [total, heads_kv, ...] with ``cu_seqlens_k_new``; of the caches' dtype.
        rotary_cos, rotary_sin: [positions, half of the rotated width], that width a multiple of 16; only with k and v. Key i
            has position ``cache_seqlens`` + i; so has query i with a causal mask or a window, else every query has
            ``cache_seqlens``.
        cache_seqlens: int32 [batch] or an integer: the number of keys of each sequence; None for the whole cache.
        cache_batch_idx: int32 [batch], the row of the cache, or of ``page_table``, of each sequence.
        cache_leftpad: int32 [batch], the first valid key of each sequence.
        page_table (``block_table``): int32 [batch, most pages]. Entries past a sequence's length are never followed.
        cu_seqlens_q, cu_seqlens_k_new: int32 [batch + 1], where each sequence begins in packed q, and in packed k and v.
        max_seqlen_q: no sequence has more queries.
        rotary_seqlens: int32 [batch], positions in place of ``cache_seqlens``.
        q_descale, k_descale, v_descale: fp32 [batch, heads_kv], of e4m3 tensors.
        rotary_interleaved: pairs (0, 1), (2, 3)...; else (i, i + half).
        num_splits: as of ``flash_attn_varlen_func``; here 0 by default.
        softmax_scale, causal, window_size, attention_chunk, softcap, alibi_slopes, s_aux, kernel, qv: as of
            ``flash_attn_varlen_func``.
        scheduler_metadata, pack_gqa, sm_margin: accepted and without effect.
        return_softmax_lse: also return the log-sum-exp.

    Returns:
        out in the shape of q with the width of v_cache, zeros for a query that sees no key; with ``return_softmax_lse``
        (out, lse), fp32 (fp64 for fp64) [batch, heads, seqlen_q] or [heads, total_q].

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line.
        NotImplementedError: an option that is not served.
    """
    store = None
    length: int | None = cache_seqlens if cache_seqlens.__class__ is int else None
    if (
        not torch.compiler.is_compiling()
        and cache_seqlens is not None
        and qv is q_descale is cu_seqlens_q is cu_seqlens_k_new is None
        and ((page_table is block_table is None) or cache_batch_idx is None)
        and (page_table is None or block_table is None)
        and attention_chunk.__class__ is int
        and attention_chunk == 0
        and window_size.__class__ is tuple
    ):
        lengths: Any = cache_seqlens if length is None else None
        table = block_table if page_table is None else page_table
        given = (
            q, k_cache, v_cache, None, None, lengths, table, cache_batch_idx, cache_leftpad, s_aux, alibi_slopes, None, None,
            k_descale, v_descale, k, v, rotary_cos, rotary_sin, rotary_seqlens,
        )  # fmt: skip
        form = "cache" if block_table is None else "blocks"
        others = (form, causal, softcap, rotary_interleaved, num_splits, return_softmax_lse, kernel, *window_size)
        found, store = cached_call(given, ALL_KEYS if length is None else length, others, softmax_scale)
        if found is not None:
            return found if return_softmax_lse else found[0]  # type: ignore[return-value]
    mask = mask_of(causal)
    check_flag(return_softmax_lse, "return_softmax_lse")
    left, right = window_of(window_size, causal)
    packed = cu_seqlens_q is not None
    check_dimensions((("q", q), ("k_cache", k_cache), ("v_cache", v_cache)), (_PACKED if packed else _ROWS, _ROWS, _ROWS))
    if (cast := autocast_beside(k_cache, v_cache, q, k, v, qv)) is not None:
        (q, k, v, qv), store = cast, None
    if q.dtype not in DTYPES:
        store = None  # the queries of the launch are others
    q, k_descale = dequantised_query(q, q_descale, k_descale)
    if cu_seqlens_q is None:
        batch, rows = q.shape[0], q.transpose(1, 2)
    else:
        check_table(cu_seqlens_q, "cu_seqlens_q", (None,), q)
        batch, rows = cu_seqlens_q.shape[0] - 1, packed_view(q)
    page_table, names = one_table(page_table, block_table), CACHE_NAMES if block_table is None else BLOCK_NAMES
    check_table(page_table, names.page_table, (None if cache_batch_idx is not None else batch, None), q)
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = rows_of_table(page_table, cache_batch_idx, batch), None
    max_q = queries_of(max_seqlen_q, q, packed)
    seqlens = lengths_of(cache_seqlens, batch, "cache_seqlens", q)
    partly = (page_table, cache_batch_idx, cache_leftpad, k)
    if seqlens is None and (packed or any(one is not None for one in partly)):
        seqlens = whole_cache(k_cache, page_table, batch, k)
    keys, values = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    tensors = Tensors(
        rows, keys, values, cu_seqlens_q, None, seqlens, page_table, cache_batch_idx, cache_leftpad, s_aux,
        slopes_of(alibi_slopes, batch), k_scale=k_descale, v_scale=v_descale,
    )  # fmt: skip
    rotary_per_query = mask == "causal" or left is not None or right is not None
    options = Options(
        mask, return_softmax_lse, kernel, left, right, checked_cap(softcap), num_splits, max_q,
        rotary_interleaved=rotary_interleaved, rotary_per_query=rotary_per_query,
        one_length=length is not None and store is not None, tokens_first=True, names=names,
    )  # fmt: skip
    new = new_keys(k, v, cu_seqlens_k_new is not None, rotary_cos, rotary_interleaved)
    if new is not None:
        assert seqlens is not None
        append = Append(
            keys, values, *new, rows, seqlens, page_table, cache_batch_idx, cu_seqlens_k_new, cu_seqlens_q, rotary_cos,
            rotary_sin, rotary_seqlens, rotary_interleaved, not rotary_per_query, max_q, names.page_table,
        )  # fmt: skip
        if store is not None and (result := append_and_attend(append, tensors, options, softmax_scale, store)) is not None:
            return result if return_softmax_lse else result[0]  # type: ignore[return-value]
        rows, seqlens = append_to_cache(append)
        tensors, store = tensors._replace(q=rows, cache_seqlens=seqlens), None
    if qv is not None:
        rows, keys = concat_qv(rows, keys, values, packed_view(qv) if packed else qv.transpose(1, 2))
        tensors = tensors._replace(q=rows, k=keys)
    out, lse = attend(with_chunks(tensors, options, attention_chunk), options, softmax_scale, store=store)
    return out if lse is None else (out, lse)
