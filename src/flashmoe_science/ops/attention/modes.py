"""What an attention call may ask for beyond softmax(Q K^T * scale) V: windows, caps, sinks, biases, ragged lengths, pages.

``Modes`` says which, without tensors: it is a part of an AttentionProblem and decides what a kernel is built for. ``Extras``
are the tensors and numbers of one such call. How the keys and values of a call lie in memory follows from ``Modes``:

- lengths "equal": K and V are [batch, heads_kv, seqlen_k, head_dim] views, all sequences of one length;
- lengths "ragged": as many queries in each sequence, keys in a cache: [caches, heads_kv, capacity, head_dim] views and
  ``cache_seqlens``; with pages [pages, heads_kv, page, head_dim] views and a ``page_table``;
- lengths "packed": queries of all sequences one after another, a [1, heads, total_q, head_dim] view with ``cu_seqlens_q``;
  keys the same with ``cu_seqlens_k``, or paged as above with ``cache_seqlens``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Lengths = Literal["equal", "ragged", "packed"]
Bias = Literal["none", "alibi", "boolean", "additive"]


@dataclass(frozen=True, slots=True)
class Modes:
    """Which modes a problem has; the default has none.

    window_left, window_right: query i sees keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right,
        both included (FlashAttention's meaning); None for no limit. A causal mask has a right of 0 by itself.
    softcap: scores s become cap * tanh(s / cap) before the mask; 0 for none. A call's own value may be a fraction.
    sinks: each query head has a learned logit that takes part in the softmax and has no value.
    bias: "alibi" adds -slope * |i + seqlen_k - seqlen_q - j|; "boolean" hides where False; "additive" adds a tensor.
    prefix: under a causal mask, keys before this one are seen by every query of their sequence.
    lengths: see the module.
    page: rows of a page of the key-value cache; 0 for a contiguous one.
    leftpad: the first valid key of each cached sequence is given.
    fp8_cache: K and V are e4m3 with a scale for each sequence and key head.
    """

    window_left: int | None = None
    window_right: int | None = None
    softcap: int = 0
    sinks: bool = False
    bias: Bias = "none"
    prefix: int = 0
    lengths: Lengths = "equal"
    page: int = 0
    leftpad: bool = False
    fp8_cache: bool = False


PLAIN = Modes()


@dataclass(frozen=True, slots=True)
class Extras:
    """The tensors and numbers of one call's modes. Those that its Modes do not name are None, or 0.

    cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], where each packed sequence begins, and the total.
    cache_seqlens: int32 [batch], keys of each cached sequence. Where the queries are packed, ``cu_seqlens_k`` or this is given.
    page_table: int32 [batch, most pages]; entries past a sequence's length are never read as addresses.
    cache_batch_idx: int32 [batch], the row of the cache of each sequence (not with pages).
    leftpad: int32 [batch], the first valid key of each sequence.
    max_seqlen_q, max_seqlen_k: of packed queries, and of any ragged keys: no sequence is longer. They size grids and splits.
    softcap: the cap itself.
    sinks: [heads], fp32 or the input dtype.
    alibi_slopes: fp32 [batch, heads] (a batch stride of 0 where they are shared).
    bias: bool or the input dtype, a [batch, heads, seqlen_q, seqlen_k] view of any strides, 0 among them.
    prefix: int32 [batch], keys that all queries of a sequence see.
    k_scale, v_scale: fp32 [batch, heads_kv] of an e4m3 cache.
    """

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    cache_seqlens: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    prefix: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


NO_EXTRAS = Extras()
