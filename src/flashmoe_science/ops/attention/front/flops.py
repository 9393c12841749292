"""Floating-point operations of attention's operators, as PyTorch's FlopCounterMode counts its own: a mask hides none."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.ops.attention.call.tensors import Options, Tensors, max_keys, sequences
from flashmoe_science.ops.attention.front.arguments import unpacked
from flashmoe_science.ops.calls import PLAIN


def of_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, out_val: object = None) -> int:
    """FLOPs of ``flashmoe::attention_forward``: two products."""
    tensors, options, _ = unpacked((q, k, v), *rest)
    return 2 * _scores(tensors, options) * (q.shape[3] + v.shape[3])


def of_backward(
    dout: object, dlse: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: object, lse: object, wanted: object,
    mask: Any, softmax_scale: float | None = None, kernel_name: str | None = None, *rest: Any, out_val: object = None,
) -> int:  # fmt: skip
    """FLOPs of ``flashmoe::attention_backward``: five products, one of them the forward's once more."""
    tensors, options, _ = unpacked((q, k, v), mask, softmax_scale, True, kernel_name, *rest)
    return 2 * _scores(tensors, options) * (3 * q.shape[3] + 2 * v.shape[3])


def _scores(tensors: Tensors, options: Options) -> int:
    """Pairs of a query and a key, over all heads. Lengths on the device are read; of fake ones the longest count."""
    heads, lengths = tensors.q.shape[1], (tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.cache_seqlens)
    packed, readable = lengths[0] is not None, all(one is None or type(one) in PLAIN for one in lengths)
    queries: Any = options.max_seqlen_q if packed else tensors.q.shape[2]
    keys: Any = max_keys(tensors, options)
    if not readable or lengths == (None, None, None):
        return int(heads * sequences(tensors) * queries * keys)
    if lengths[0] is not None:
        queries = lengths[0].diff()
    if lengths[2] is not None:
        keys = lengths[2]
    elif lengths[1] is not None:
        keys = lengths[1].diff()
    return heads * int((queries * keys).sum())
