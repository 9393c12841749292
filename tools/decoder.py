"""A decoder of random weights in plain PyTorch: a Llama, or a mixture of experts. What attends, and experts, are arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]  # (x [tokens, width], router logits, w1, w2, top_k)


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


SIZES = {
    "8b": Size(32, 4096, 32, 8, 128, 14336, 128256),
    "qwen3-30b": Size(48, 2048, 32, 4, 128, 768, 151936, 128, 8),
    "tiny": Size(2, 64, 4, 2, 16, 96, 97),
    "tiny-moe": Size(2, 64, 4, 2, 16, 32, 97, 8, 2),
}


class Decoder:
    """A Llama of random weights, or a mixture of experts."""

    def __init__(self, size: Size, device: str, dtype: torch.dtype, positions: int) -> None:
        self.size = size
        generator = torch.Generator(device).manual_seed(0)

        def weight(*shape: int) -> Tensor:
            random = torch.empty(shape, dtype=dtype, device=device)
            return random.normal_(0.0, shape[-1] ** -0.5, generator=generator)

        both, some = size.heads + 2 * size.heads_kv, (size.experts,) if size.experts else ()
        self.embedding = weight(size.vocabulary, size.width) * size.width**0.5
        self.head = weight(size.vocabulary, size.width)
        self.layers = [
            {
                "qkv": weight(both * size.head_dim, size.width), "out": weight(size.width, size.heads * size.head_dim),
                "up": weight(*some, 2 * size.inner, size.width), "down": weight(*some, size.width, size.inner),
                **({"router": weight(size.experts, size.width)} if some else {}),
            }
            for _ in range(size.layers)
        ]  # fmt: skip
        angle = torch.arange(positions, device=device)[:, None] / 500000.0 ** (
            torch.arange(0, size.head_dim, 2, device=device) / size.head_dim
        )
        self.rotation = torch.cat([angle.cos(), angle.sin()], 1).to(dtype)  # [positions, head_dim]

    def _rotated(self, heads: Tensor, rotation: Tensor) -> Tensor:
        a, b = heads.chunk(2, -1)
        cos, sin = rotation[:, :, None].chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _mlp(self, states: Tensor, layer: dict[str, Tensor], experts: Experts | None) -> Tensor:
        if experts is None:
            gate, up = F.linear(states, layer["up"]).chunk(2, -1)
            return F.linear(F.silu(gate) * up, layer["down"])
        rows = states.flatten(0, 1)
        out = experts(rows, F.linear(rows, layer["router"]), layer["up"], layer["down"], self.size.top_k)
        return out.view_as(states)

    def forward(
        self,
        tokens: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        experts: Experts | None,
        rotation: Tensor,
    ) -> Tensor:
        """Logits of the last token, [batch, vocabulary]. ``rotation`` is [batch or 1, length, head_dim]."""
        states = self.through(F.embedding(tokens, self.embedding), attend, experts, rotation)
        return F.linear(F.rms_norm(states[:, -1], (self.size.width,)), self.head)

    def through(
        self,
        states: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        experts: Experts | None,
        rotation: Tensor,
    ) -> Tensor:
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
