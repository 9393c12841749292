"""Attention of tools/decoder.py's decoders by ours and by others: of a prompt, and of one token beside a cache."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from flashmoe_science import flash_attn_func, flash_attn_with_kvcache

Tensor = torch.Tensor


class Attention(Protocol):
    """What differs. Tensors are [batch, length, heads, head_dim]."""

    name: str

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **more: Any) -> Tensor:
        """``more``: what ``Decoder.of_attention`` gives, of which there is nothing but of a gpt-oss."""

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, length: int, *_: Any, **more: Any
    ) -> Tensor:
        """One new token, appended to the caches behind ``lengths`` (all ``length``), attends to all."""


def alone(result: Any) -> Tensor:
    """The output alone, where the log-sum-exp may come with it."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


class Ours:
    name = "fms"

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        if more:  # flash_attn_func has no sinks
            return alone(flash_attn_with_kvcache(q, k, v, causal=True, **more))
        return alone(flash_attn_func(q, k, v, causal=True))

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, length: int, **more: Any
    ) -> Tensor:
        return alone(flash_attn_with_kvcache(q, keys, values, k, v, cache_seqlens=lengths, causal=True, **more))


class FlashAttention3:
    name = "fa3"

    def __init__(self) -> None:
        import fa3_fwd_interface

        self.library = fa3_fwd_interface

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return alone(self.library.flash_attn_func(q, k, v, causal=True))

    def step(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, length: int) -> Tensor:
        return alone(self.library.flash_attn_with_kvcache(q, keys, values, k, v, cache_seqlens=lengths, causal=True))


class Sdpa:
    """PyTorch's. ``grouped``: a step's queries of a key head are given as its rows, as transformers does."""

    def __init__(self, grouped: bool) -> None:
        self.grouped = grouped
        self.name = "sdpa-grouped" if grouped else "sdpa"

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def step(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, length: int) -> Tensor:
        keys[:, length], values[:, length] = k[:, 0], v[:, 0]
        keys, values = (one[:, : length + 1].transpose(1, 2) for one in (keys, values))
        if self.grouped:
            rows = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
            return F.scaled_dot_product_attention(rows, keys, values).reshape(q.shape)
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=True).transpose(1, 2)


class AtenFlash:
    """PyTorch's own FlashAttention with sinks, by the operator below SDPA: that has no windows and gives no log-sum-exp."""

    name = "aten-flash"

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, *, window_size: tuple[int, int], s_aux: Tensor) -> Tensor:
        lengths, (left, right) = (q.shape[1], k.shape[1]), window_size
        window = {"window_size_left": left, "window_size_right": right}
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, None, None, *lengths, 0.0, True, False, **window)
        of_keys = torch.sigmoid(lse.reshape(q.shape[0], q.shape[2], -1) - s_aux[:, None])  # [batch, heads, length]
        return alone(out.mul_(of_keys.transpose(1, 2)[..., None]))

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, length: int,
        *, window_size: tuple[int, int], s_aux: Tensor,
    ) -> Tensor:  # fmt: skip
        keys[:, length], values[:, length] = k[:, 0], v[:, 0]
        first = max(0, length - window_size[0]) if window_size[0] >= 0 else 0
        seen = keys[:, first : length + 1], values[:, first : length + 1]
        return self.prefill(q, *seen, window_size=(-1, -1), s_aux=s_aux)
