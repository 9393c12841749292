"""The attention of Hugging Face transformers' models by our kernels: ``attn_implementation="fms"``.

transformers hands an implementation a layer's queries, keys and values [batch, heads, length, head_dim], the mask that
``transformers_masks.make_mask`` made for the pass, and by keyword what the layer adds: a soft cap, learned sinks, a position
bias. What cannot be served is refused; nothing is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from flashmoe_science.integrations.transformers_masks import Packed, StructuredMask, make_mask
from flashmoe_science.ops.attention.call.checks import Unsupported
from flashmoe_science.ops.attention.call.packed import owners
from flashmoe_science.ops.attention.call.tensors import Options, Tensors
from flashmoe_science.ops.attention.front.backward.choose import choose_backward
from flashmoe_science.ops.attention.front.backward.kernels import FALLBACK
from flashmoe_science.ops.attention.front.flash import max_seqlen
from flashmoe_science.ops.attention.front.operator import attend, attend_with_dropout
from flashmoe_science.ops.attention.problem import Mask

NAME = "fms"  # transformers takes a name with "flash" in it for a FlashAttention

_UNSERVED = ("sinks", "cache", "block_table", "block_indices")  # keywords of single models that change the result
_SPLIT_QUERIES = 16  # of a padded sequence, up to which it is served by lengths: keys are split over programs then
_PLAIN: dict[Mask, Options] = {"full": Options("full"), "causal": Options("causal")}


def register() -> None:
    """Register ``attn_implementation="fms"`` with transformers, with its mask. A second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)  # without it transformers drops the padding mask


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention, for transformers, of query [B, H, Sq, D] to key and value [B, Hk, Sk, D], Hk a divisor of H.

    Args:
        attention_mask: of ``make_mask``; or a model's own, boolean (True is seen) or added to the scores, broadcasting to [B,
            H, Sq, Sk]; or None: then ``is_causal`` (by default ``module.is_causal``) and ``sliding_window`` are the mask. A
            query that sees no key, such as padding, gets zeros.
        others: ``cu_seq_lens_q``, ``cu_seq_lens_k`` and ``max_length_q``, ``max_length_k``, from a collator, say where packed
            sequences begin and how long they are at most: a sequence sees only itself.
        dropout: above 0, and head dimensions above 256, are served by PyTorch's attention.
        softcap: scores s become softcap * tanh(s / softcap).
        s_aux: [H], a learned logit of each head in the softmax, without a value.
        position_bias: added to the scores, broadcasting to [B, H, Sq, Sk].

    Returns:
        (out [B, Sq, H, D] contiguous, None): attention weights are never made.

    Raises:
        ValueError: a keyword that changes the result and is not served, or what PyTorch's attention would have to serve and
            cannot.
        TypeError, ValueError: what our attention functions refuse.
    """
    for name in _UNSERVED:
        if others.get(name) is not None:
            raise ValueError(f"attn_implementation={NAME!r} does not serve {name}, which {type(module).__name__} passes")
    if module.__dict__.get("_modules", {}).get("compressor") is not None:  # DeepSeek-V4 writes -inf into a mask of booleans
        raise ValueError(f"attn_implementation={NAME!r} does not serve the compressed keys of {type(module).__name__}")
    queries, sequences = query.shape[2], _given_sequences(query, key, others)
    if attention_mask is None:
        causal = queries > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        call = _by_flags(causal, sliding_window, queries, key.shape[2])
    elif isinstance(attention_mask, StructuredMask) and _says_all(attention_mask, key, sequences, position_bias):
        call = _by_structure(attention_mask, queries)
    else:
        matrix = attention_mask.matrix() if isinstance(attention_mask, StructuredMask) else attention_mask
        call, sequences = _Call("full", key.shape[2], matrix=_within(matrix, sequences, query, key)), None
    if sequences is not None:
        if position_bias is not None:
            raise ValueError(f"attn_implementation={NAME!r} does not serve position_bias with cu_seq_lens_q and no mask")
        call.packed, call.keys = sequences, key.shape[2]
    if call.keys < key.shape[2]:  # the rest of a static cache is empty
        key, value = key[:, :, : call.keys], value[:, :, : call.keys]
    call.add_bias(query, position_bias)
    call.softcap = float(softcap or 0.0)
    if s_aux is not None:
        call.tensors["sinks"] = s_aux.reshape(-1)
    if call.is_packed():
        out: torch.Tensor | None = call.serve_packed(query, key, value, scaling, dropout)
    else:
        try:
            out = None if dropout else call.serve(query, key, value, scaling)
        except Unsupported:
            out = None
    if out is None:
        out = _by_pytorch(query, key, value, attention_mask, position_bias, call, dropout, scaling)
    return out.transpose(1, 2).contiguous(), None


@dataclass
class _Call:
    """Arguments of our functions: ``keys`` of the keys, a window, tensors by their names in Tensors.

    matrix: a mask that has no structure, which becomes a bias.
    packed: packed sequences, also for padded rows of more than a few queries, as the prompt kernels take them. What these
        kernels lack (a bias, gradients by PyTorch's operators) is served by lengths, then in ``tensors``.
    """

    mask: Mask
    keys: int
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    max_seqlen_q: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    matrix: torch.Tensor | None = None
    packed: Packed | None = None

    def add_bias(self, query: torch.Tensor, position_bias: torch.Tensor | None) -> None:
        bias = _sum(self.matrix, None if position_bias is None else position_bias[..., : self.keys])
        if bias is not None:
            bias = bias if bias.dtype == torch.bool else bias.to(query.dtype)
            self.tensors["bias"] = bias.expand(*query.shape[:3], self.keys)

    def is_packed(self) -> bool:
        """Whether there are packed sequences and nothing else."""
        return self.packed is not None and "cache_seqlens" not in self.tensors

    def serve(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
        if not self.tensors and self.left is self.right is None and not self.softcap:
            return attend((query, key, value), _PLAIN[self.mask], scaling)[0]
        tensors = Tensors(query, key, value, **self.tensors)
        if self.packed is None or tensors.bias is not None or (tensors.needs_grad() and self._is_pytorchs(query, key, value)):
            most = (self.max_seqlen_q, self.keys if self.max_seqlen_q else 0)
            return attend(tensors, self._options()._replace(max_seqlen_q=most[0], max_seqlen_k=most[1]), scaling)[0]
        return self.serve_packed(query, key, value, scaling)

    def serve_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, dropout: float = 0.0
    ) -> torch.Tensor:
        tensors, options = self._as_packed(query, key, value)
        out = attend_with_dropout(tensors, options, scaling, dropout)[0] if dropout else attend(tensors, options, scaling)[0]
        return out.reshape(query.shape[0], query.shape[2], *out.shape[1:]).transpose(1, 2)

    def _is_pytorchs(self, *rows: torch.Tensor) -> bool:
        """Whether PyTorch's operators would serve packed sequences: they pad them, and lengths cost half."""
        return choose_backward(*self._as_packed(*rows)).kernel == FALLBACK

    def _as_packed(self, *rows: torch.Tensor) -> tuple[Tensors, Options]:
        assert self.packed is not None
        starts_q, starts_k, used, *most = self.packed
        q, k, v = (one.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0) for one in rows)
        options = self._options()._replace(max_seqlen_q=most[0], max_seqlen_k=most[1], tokens_first=True)
        return Tensors(q, k, v, starts_q, starts_k, used, sinks=self.tensors.get("sinks")), options

    def _options(self) -> Options:
        return Options(self.mask, False, None, self.left, self.right, self.softcap)


def _given_sequences(query: torch.Tensor, key: torch.Tensor, keywords: dict[str, Any]) -> Packed | None:
    """The packed sequences of transformers' keywords for FlashAttention; None without them."""
    starts, most = [], []
    for side, rows in (("q", query), ("k", key)):
        of_side, longest = keywords.get(f"cu_seq_lens_{side}"), keywords.get(f"max_length_{side}")
        if of_side is None:
            return None
        total = rows.shape[0] * rows.shape[2]
        starts.append(of_side.int())
        most.append(total if longest is None else max_seqlen(longest, f"max_length_{side}", total))
    return Packed(starts[0], starts[1], None, most[0], most[1])


def _says_all(mask: StructuredMask, key: torch.Tensor, sequences: Packed | None, position_bias: torch.Tensor | None) -> bool:
    """Whether the structure of a mask may be served without its matrix."""
    visible = mask.visible
    packed = position_bias is None or visible.sequences is None
    return mask.shape[3] == key.shape[2] and packed and (sequences is None or visible.end is None)


def _within(matrix: torch.Tensor, sequences: Packed | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask without the keys of other sequences."""
    if sequences is None:
        return matrix
    of_q, _, _ = owners(sequences.cu_seqlens_q, query.shape[0] * query.shape[2])
    of_k, _, owned = owners(sequences.cu_seqlens_k, key.shape[0] * key.shape[2])
    of_k = torch.where(owned, of_k, -1)
    same = of_q.view(query.shape[0], 1, -1, 1) == of_k.view(key.shape[0], 1, 1, -1)
    return same & matrix if matrix.dtype == torch.bool else matrix.masked_fill(~same, -torch.inf)


def _by_flags(causal: bool, window: int | None, queries: int, keys: int) -> _Call:
    """The call of a layer without a mask: ``make_mask`` or the model made none."""
    if causal and keys > queries:  # a static cache's first pass
        keys = queries
    call = _Call("causal" if causal else "full", keys)
    if window is not None and window < keys:  # a window counts the query's own key
        call.left = window - 1
        call.right = None if causal or queries == 1 else window - 1
    return call


def _by_structure(mask: StructuredMask, queries: int) -> _Call:
    visible = mask.visible
    call = _Call("causal" if visible.causal and queries > 1 else "full", visible.length, visible.left, visible.right)
    if visible.end is not None:
        call.tensors["cache_seqlens"], call.max_seqlen_q = visible.end, queries
    if visible.first is not None:
        call.tensors["leftpad"] = visible.first
    if queries > _SPLIT_QUERIES or visible.sequences is not None:
        call.packed = mask.packed()
    return call


def _sum(mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    """A mask and a position bias as one mask; boolean if there is no number to add."""
    if mask is None or bias is None:
        return mask if bias is None else bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def _by_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    call: _Call,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """PyTorch's attention, with the mask as a matrix. Raises ValueError: the layer asks for what PyTorch's attention lacks."""
    lacking = ["softcap"] * bool(call.softcap) + ["sinks"] * ("sinks" in call.tensors)
    if attention_mask is None and call.left is not None:
        lacking.append("sliding_window")
    if lacking:
        why = f"dropout {dropout}" if dropout else f"head dimension {query.shape[3]}"
        raise ValueError(f"attn_implementation={NAME!r} does not serve {' and '.join(lacking)} with {why}; 'eager' may")
    mask = attention_mask.matrix()[..., : call.keys] if isinstance(attention_mask, StructuredMask) else call.matrix
    causal = attention_mask is None and call.mask == "causal"
    if position_bias is not None:
        if causal:
            mask, causal = torch.ones(query.shape[2], call.keys, dtype=torch.bool, device=query.device).tril(), False
        mask = _sum(mask, position_bias[..., : call.keys])
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scaling, enable_gqa=True)
