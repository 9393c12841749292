"""FlashAttention-3's functions for serving: packed sequences of any lengths, and a cache of keys and values.

Names, order and meaning of the arguments are FlashAttention-3's; FlashAttention-2's ``block_table`` and ``alibi_slopes``, a
learned sink and ``kernel`` are keywords. No value on a GPU is waited for, and calls can be captured in a CUDA graph and
replayed with other lengths. What is not served is refused in words. Tensors on the CPU, and inputs that require gradients, are
served by PyTorch's operators.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from flashmoe_science.ops.attention.call.modes_spec import ModesSpec, check_table
from flashmoe_science.ops.attention.call.packed import used_rows
from flashmoe_science.ops.attention.call.spec import check_flag
from flashmoe_science.ops.attention.front.append_op import append_to_cache
from flashmoe_science.ops.attention.front.flash_args import (
    CACHE_NAMES,
    FLASH_NAMES,
    FLASH_OTHERS,
    VARLEN_OTHERS,
    append_of,
    check_dimensions,
    checked_cap,
    dequantised_query,
    lengths_of,
    longest,
    mask_of,
    one_table,
    packed_view,
    queries_of,
    rows_of_table,
    slopes_of,
    whole_cache,
    window_of,
    with_chunks,
    with_second_query,
)
from flashmoe_science.ops.attention.front.known_calls import NO_APPEND, first_launch, launch_known
from flashmoe_science.ops.attention.front.modes_op import attend_with
from flashmoe_science.ops.attention.problem import KEY_CLASS
from flashmoe_science.ops.attention.problem.features import Extras

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]

_PACKED, _ROWS, _PAGES = (
    ("tokens, heads, head_dim", 3),
    ("batch, tokens, heads, head_dim", 4),
    ("pages, rows, heads, head_dim", 4),
)


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
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    block_table: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences of any lengths that lie one after another, with FlashAttention-3's signature and semantics.

    Args:
        q: [total_q, heads, head_dim]; k and v: [total_k, heads_kv, ...], or with ``block_table`` [pages, rows, heads_kv, ...].
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], where each sequence begins, and the total. The second may be None with
            ``block_table`` and ``seqused_k``.
        max_seqlen_q, max_seqlen_k: no sequence is longer.
        seqused_q, seqused_k: int32 [batch], how many of each sequence's queries and keys take part; other rows give zeros.
        softmax_scale: of the scores; head_dim ** -0.5 by default.
        causal: the last query of a sequence sees its last key; a query that sees no key gets zeros.
        q_descale, k_descale, v_descale: fp32 [batch, heads_kv], of e4m3 tensors. The output is then bf16 or q's dtype.
        window_size: query i sees keys i + seqlen_k - seqlen_q - left to ... + right, both included; -1 for no limit.
        attention_chunk: above 0, queries see only keys of their own chunk of so many positions.
        softcap: scores s become softcap * tanh(s / softcap); 0.0 for none.
        num_splits: into how many pieces the keys are split; 1 for a result that does not depend on the batch; 0 for our choice,
            by which the last bits of a sequence's result may depend on the lengths of the others. Equal calls give equal bits.
        return_attn_probs: also return the log-sum-exp.
        block_table: int32 [batch, most pages], the pages of each sequence. Entries past its length are never followed.
        alibi_slopes: fp32 [heads] or [batch, heads]: adds -slope * |i + seqlen_k - seqlen_q - j| to the scores.
        s_aux: [heads], a learned logit that takes part in each row's softmax and has no value (a sink); the log-sum-exp has it.
        kernel: serve by this kernel or raise.
        pack_gqa, deterministic, sm_margin: accepted and without effect; the forward is always deterministic.
        qv: [total_q, heads, head_dim_v], a second query against v: the scores are (q k^T + qv v^T) * softmax_scale, by default
            (head_dim + head_dim_v) ** -0.5. k and v are copied beside each other for it.

    Returns:
        out [total_q, heads, head_dim_v]; with ``return_attn_probs`` (out, lse [heads, total_q] fp32).

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line.
        NotImplementedError: an option that is not served.
    """
    key: Hashable = None
    cu_keys = cu_seqlens_k if block_table is None else None
    tensors = (
        q, k, v, cu_seqlens_q, cu_keys, seqused_k, block_table, None, None, s_aux, alibi_slopes, None, k_descale, v_descale,
        *NO_APPEND,
    )  # fmt: skip
    if (
        not torch.compiler.is_compiling()
        and qv is q_descale is seqused_q is None
        and (seqused_k if cu_keys is None else cu_keys) is not None
        and max_seqlen_q.__class__ is max_seqlen_k.__class__ is attention_chunk.__class__ is int
        and attention_chunk == 0 <= max_seqlen_k
    ):
        # A call serves all of a class of ``max_seqlen_k``, which decides nothing but the number of splits.
        options = (causal, softcap, num_splits, return_attn_probs, kernel, max_seqlen_q, -(-max_seqlen_k // KEY_CLASS))
        found, key = launch_known(tensors, 0, window_size, softmax_scale, options)
        if found is not None:
            return found if return_attn_probs else found[0]  # type: ignore[return-value]
    mask = mask_of(causal)
    check_flag(return_attn_probs, "return_attn_probs")
    left, right = window_of(window_size, causal)
    kind = _PACKED if block_table is None else _PAGES
    check_dimensions((("q", q), ("k", k), ("v", v)), (_PACKED, kind, kind))
    q, k_descale = dequantised_query(q, q_descale, k_descale)
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q is None; it must be an int32 tensor of batch + 1 numbers")
    check_table(cu_seqlens_q, "cu_seqlens_q", (None,), q)
    q, k = with_second_query(q, k, v, qv)
    most_q, total_q = longest(max_seqlen_q, "max_seqlen_q", q.shape[0]), q.shape[0]
    used = None
    if seqused_q is not None:
        check_table(seqused_q, "seqused_q", (cu_seqlens_q.shape[0] - 1,), q)
        used = used_rows(cu_seqlens_q, seqused_q, total_q)
        q, cu_seqlens_q = q.index_select(0, used.source), used.cu_seqlens
    if block_table is not None:
        if seqused_k is None and cu_seqlens_k is not None:
            check_table(cu_seqlens_k, "cu_seqlens_k", (cu_seqlens_q.shape[0],), q)
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        cu_seqlens_k = None
    batch = cu_seqlens_q.shape[0] - 1
    most = k.shape[0] if block_table is None else block_table.shape[1] * k.shape[1]
    extras = Extras(
        cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, None, None, most_q, longest(max_seqlen_k, "max_seqlen_k", most),
        checked_cap(softcap), s_aux, slopes_of(alibi_slopes, batch), None, None, k_descale, v_descale,
    )  # fmt: skip
    rows, keys, values = packed_view(q), packed_view(k), packed_view(v)
    if block_table is not None:
        keys, values = k.transpose(1, 2), v.transpose(1, 2)
    extras = with_chunks(extras, attention_chunk, rows, keys)
    spec = ModesSpec(mask, left, right, return_attn_probs, kernel, num_splits, FLASH_NAMES, VARLEN_OTHERS)
    if key is not None:
        found = first_launch(key, tensors, 0, (rows, keys, values), extras, spec, softmax_scale, None)
        if found is not None:
            return found if return_attn_probs else found[0]  # type: ignore[return-value]
    result, lse = attend_with(rows, keys, values, extras, spec, softmax_scale)
    out = result[0].transpose(0, 1)
    if used is not None:
        out = torch.where(used.used[:, None, None], out.index_select(0, used.place), 0.0)
    if lse is None:
        return out
    lse = lse[0]
    if used is not None:
        lse = torch.where(used.used, lse.index_select(1, used.place), -torch.inf)
    return out, lse


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
    softcap: float = 0.0,
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

    With ``k`` and ``v`` the cache grows first, in place: they are written behind the first ``cache_seqlens`` of each sequence,
    whose length is then that much more (``cache_seqlens`` itself is not changed). What would lie past the capacity is not
    written.

    Args:
        q: [batch, seqlen_q, heads, head_dim], or [total_q, heads, head_dim] with ``cu_seqlens_q`` and ``max_seqlen_q``.
        k_cache, v_cache: [caches, capacity, heads_kv, ...], or with ``page_table`` [pages, rows, heads_kv, ...], rows of any
            number. fp16, bf16 or fp32 as q, or e4m3.
        k, v: [batch, new, heads_kv, ...], or packed [total, heads_kv, ...] with ``cu_seqlens_k_new``; of the caches' dtype.
        rotary_cos, rotary_sin: [positions, half of the rotated width], a multiple of 16 rotated; with k and v only. Key i is at
            ``cache_seqlens`` + i; query i too with a causal mask or a window, else every query at ``cache_seqlens``.
        cache_seqlens: int32 [batch] or an integer: the keys that each sequence has; None for the whole cache.
        cache_batch_idx: int32 [batch], the row of the cache, or of ``page_table``, of each sequence.
        cache_leftpad: int32 [batch], the first valid key of each sequence.
        page_table (``block_table``): int32 [batch, most pages]. Entries past a sequence's length are never followed.
        cu_seqlens_q, cu_seqlens_k_new: int32 [batch + 1], where each sequence begins in packed q, and in packed k and v.
        max_seqlen_q: no sequence has more queries.
        rotary_seqlens: int32 [batch], positions in place of ``cache_seqlens``.
        q_descale, k_descale, v_descale: fp32 [batch, heads_kv], of e4m3 tensors.
        rotary_interleaved: pairs (0, 1), (2, 3)...; else (i, i + half).
        num_splits: into how many pieces the keys are split; 0 for our choice, by which the last bits of a sequence's result may
            depend on the lengths of the others; 1 for a result that does not depend on the batch. Equal calls give equal bits.
        softmax_scale, causal, window_size, attention_chunk, softcap, alibi_slopes, s_aux, kernel, qv: as of
            ``flash_attn_varlen_func``.
        scheduler_metadata, pack_gqa, sm_margin: accepted and without effect.
        return_softmax_lse: also return the log-sum-exp.

    Returns:
        out in the shape of q with the width of v_cache, zeros for a query that sees no key; with ``return_softmax_lse``
        (out, lse), fp32 [batch, heads, seqlen_q] or [heads, total_q].

    Raises:
        TypeError, ValueError: an argument that is not allowed, in one line.
        NotImplementedError: an option that is not served.
    """
    key: Hashable = None
    table, length = block_table if page_table is None else page_table, 0
    all_lengths: Any = cache_seqlens
    if cache_seqlens.__class__ is int:
        length, all_lengths = cache_seqlens, None
    tensors = (
        q, k_cache, v_cache, None, None, all_lengths, table, cache_batch_idx, cache_leftpad, s_aux, alibi_slopes, None,
        k_descale, v_descale, k, v, rotary_cos, rotary_sin, rotary_seqlens,
    )  # fmt: skip
    if (
        not torch.compiler.is_compiling()
        and cache_seqlens is not None
        and qv is q_descale is cu_seqlens_q is cu_seqlens_k_new is None
        and (table is None or cache_batch_idx is None)
        and (page_table is None or block_table is None)
        and attention_chunk.__class__ is int
        and attention_chunk == 0
    ):
        options = (causal, softcap, rotary_interleaved, num_splits, return_softmax_lse, kernel)
        found, key = launch_known(tensors, length, window_size, softmax_scale, options)
        if found is not None:
            return found if return_softmax_lse else found[0]  # type: ignore[return-value]
    mask = mask_of(causal)
    check_flag(return_softmax_lse, "return_softmax_lse")
    left, right = window_of(window_size, causal)
    cap = checked_cap(softcap)
    packed = cu_seqlens_q is not None
    check_dimensions((("q", q), ("k_cache", k_cache), ("v_cache", v_cache)), (_PACKED if packed else _ROWS, _ROWS, _ROWS))
    q, k_descale = dequantised_query(q, q_descale, k_descale)
    if cu_seqlens_q is None:
        batch, rows = q.shape[0], q.transpose(1, 2)
    else:
        check_table(cu_seqlens_q, "cu_seqlens_q", (None,), q)
        batch, rows = cu_seqlens_q.shape[0] - 1, packed_view(q)
    page_table = one_table(page_table, block_table)
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = rows_of_table(page_table, cache_batch_idx, batch), None
    most_q = queries_of(max_seqlen_q, q, packed)
    seqlens = lengths_of(cache_seqlens, batch, "cache_seqlens", q)
    partly = (page_table, cache_batch_idx, cache_leftpad, k)
    if seqlens is None and (packed or any(one is not None for one in partly)):
        seqlens = whole_cache(k_cache, page_table, batch, k)
    keys, values = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    extras = Extras(
        cu_seqlens_q, None, seqlens, page_table, cache_batch_idx, cache_leftpad, most_q, 0, cap,
        s_aux, slopes_of(alibi_slopes, batch), None, None, k_descale, v_descale,
    )  # fmt: skip
    spec = ModesSpec(mask, left, right, return_softmax_lse, kernel, num_splits, CACHE_NAMES, FLASH_OTHERS)
    moving = mask == "causal" or left is not None or right is not None
    append = append_of(k, v, cu_seqlens_k_new is not None, rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved, moving)
    if key is not None:
        found = first_launch(key, tensors, length, (rows, keys, values), extras, spec, softmax_scale, append)
        if found is not None:
            return found if return_softmax_lse else found[0]  # type: ignore[return-value]
    if append is not None:
        assert seqlens is not None
        rows, seqlens = append_to_cache(
            keys, values, append.k, append.v, rows, seqlens, page_table, cache_batch_idx, cu_seqlens_k_new, cu_seqlens_q,
            rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved, not moving, most_q,
        )  # fmt: skip
        extras = replace(extras, cache_seqlens=seqlens)
    if qv is not None:
        rows, keys = with_second_query(rows, keys, values, packed_view(qv) if packed else qv.transpose(1, 2))
    extras = with_chunks(extras, attention_chunk, rows, keys)
    out, lse = attend_with(rows, keys, values, extras, spec, softmax_scale)
    out = out[0].transpose(0, 1) if packed else out.transpose(1, 2)
    if lse is None:
        return out
    return out, lse[0] if packed else lse
