"""A decoder of random weights in plain PyTorch: a Llama, or a mixture of experts. What attends, and experts, are arguments.

Experts in a format are drawn in the dtype and quantised; those of the dtype beside them are these dequantised. A gpt-oss has
its sinks, windows, activation and biases of experts, but neither biases of attention and router nor YaRN's scaling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from flashmoe_science import dequantize_experts, quantize_experts

Tensor = torch.Tensor
Layer = dict[str, Tensor]
DENSE = "up", "down"  # of a layer: its experts in the dtype, and in the format of the size as ``fused_moe`` names them
IN_FORMAT = "gate_up_proj", "down_proj", "gate_up_scale", "down_scale"
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v)


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    heads_kv: int
    head_dim: int
    inner: int  # of an expert, where there are any
    vocabulary: int
    experts: int = 0
    top_k: int = 0
    weight_format: str | None = None  # of the experts
    window: int = 0  # keys that layers of even number see; a decoder with windows is a gpt-oss


Experts = Callable[[Tensor, Tensor, Layer, Size], Tensor]  # (x [tokens, width], router logits, ...)
_QWEN3 = Size(48, 2048, 32, 4, 128, 768, 151936, 128, 8)
SIZES = {
    "8b": Size(32, 4096, 32, 8, 128, 14336, 128256),
    "qwen3-30b": _QWEN3,
    "qwen3-30b-fp8": replace(_QWEN3, weight_format="fp8_block"),
    "gpt-oss-20b": Size(24, 2880, 64, 8, 64, 2880, 201088, 32, 4, "mxfp4", 128),
    "tiny": Size(2, 64, 4, 2, 16, 96, 97),
    "tiny-moe": Size(2, 64, 4, 2, 16, 32, 97, 8, 2),
    "tiny-fp8": Size(2, 160, 4, 2, 16, 96, 97, 8, 2, "fp8_block"),
    "tiny-mxfp4": Size(2, 64, 4, 2, 16, 32, 97, 8, 2, "mxfp4", 8),
}


class Decoder:
    """``dense``: experts in a format are held in the dtype too."""

    def __init__(self, size: Size, device: str, dtype: torch.dtype, positions: int, dense: bool = True) -> None:
        self.size = size
        generator = torch.Generator(device).manual_seed(0)

        def weight(*shape: int) -> Tensor:
            random = torch.empty(shape, dtype=dtype, device=device)
            return random.normal_(0.0, shape[-1] ** -0.5, generator=generator)

        self.embedding = weight(size.vocabulary, size.width) * size.width**0.5
        self.head = weight(size.vocabulary, size.width)
        self.layers = [self._layer(weight, dense) for _ in range(size.layers)]
        angle = torch.arange(positions, device=device)[:, None] / 500000.0 ** (
            torch.arange(0, size.head_dim, 2, device=device) / size.head_dim
        )
        self.rotation = torch.cat([angle.cos(), angle.sin()], 1).to(dtype)  # [positions, head_dim]

    def _layer(self, weight: Callable[..., Tensor], dense: bool) -> Layer:
        size = self.size
        both, some = size.heads + 2 * size.heads_kv, (size.experts,) if size.experts else ()
        layer: Layer = {
            "qkv": weight(both * size.head_dim, size.width), "out": weight(size.width, size.heads * size.head_dim),
            "up": weight(*some, 2 * size.inner, size.width), "down": weight(*some, size.width, size.inner),
            **({"router": weight(size.experts, size.width)} if some else {}),
        }  # fmt: skip
        if size.window:
            layer["sinks"] = 4.0 + weight(size.heads)  # as much as a window of keys
            layer["up_bias"], layer["down_bias"] = weight(*some, 2 * size.inner), weight(*some, size.width)
        if size.weight_format is not None:
            up, down, interleaved = layer.pop("up"), layer.pop("down"), size.window > 0
            made = quantize_experts(up, down, size.weight_format, interleaved=interleaved)
            layer |= {name: made[name] for name in IN_FORMAT}
            if dense:
                layer["up"], layer["down"] = dequantize_experts(**made, interleaved=interleaved, dtype=up.dtype)
        return layer

    def weight_bytes(self, unread: tuple[str, ...] = ()) -> int:
        """Of all weights but those of a layer that are named."""
        of_layers = [one for layer in self.layers for name, one in layer.items() if name not in unread]
        read: int = sum(one.nbytes for one in (self.embedding, self.head, *of_layers))
        return read

    def of_attention(self, layer: int) -> dict[str, Any]:
        """What attention of a layer takes beside queries, keys and values, as ``flash_attn_with_kvcache`` names it."""
        if not self.size.window:
            return {}
        window = (self.size.window - 1, 0) if layer % 2 == 0 else (-1, -1)
        return {"window_size": window, "s_aux": self.layers[layer]["sinks"]}

    def _rotated(self, heads: Tensor, rotation: Tensor) -> Tensor:
        a, b = heads.chunk(2, -1)
        cos, sin = rotation[:, :, None].chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _mlp(self, states: Tensor, layer: Layer, experts: Experts | None) -> Tensor:
        if experts is None:
            gate, up = F.linear(states, layer["up"]).chunk(2, -1)
            return F.linear(F.silu(gate) * up, layer["down"])
        rows = states.flatten(0, 1)
        out = experts(rows, F.linear(rows, layer["router"]), layer, self.size)
        return out.view_as(states)

    def forward(self, tokens: Tensor, attend: Attend, experts: Experts | None, rotation: Tensor) -> Tensor:
        """Logits of the last token, [batch, vocabulary]. ``rotation`` is [batch or 1, length, head_dim]."""
        states = self.through(F.embedding(tokens, self.embedding), attend, experts, rotation)
        return F.linear(F.rms_norm(states[:, -1], (self.size.width,)), self.head)

    def through(self, states: Tensor, attend: Attend, experts: Experts | None, rotation: Tensor) -> Tensor:
        """The states [batch, length, width] behind all layers."""
        size = self.size
        counts = (size.heads, size.heads_kv, size.heads_kv)
        for index, layer in enumerate(self.layers):
            both = F.linear(F.rms_norm(states, (size.width,)), layer["qkv"]).unflatten(-1, (sum(counts), size.head_dim))
            q, k, v = both.split(counts, 2)
            out = attend(index, self._rotated(q, rotation), self._rotated(k, rotation), v)
            states = states + F.linear(out.flatten(2), layer["out"])
            states = states + self._mlp(F.rms_norm(states, (size.width,)), layer, experts)
        return states
