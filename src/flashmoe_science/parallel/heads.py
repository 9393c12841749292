"""Shards of a sequence, exchanged for all of its tokens in a share of the heads, and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flashmoe_science.ops.explain import is_explaining
from flashmoe_science.parallel.agree import once_differentiable, waiting
from flashmoe_science.parallel.layout import Cut


def to_heads(x: torch.Tensor, cut: Cut) -> torch.Tensor:
    """[tokens of the sequence, ..., heads / N, width] of this rank's shard [its tokens, ..., heads, width]. Differentiable."""
    sizes, ranks = _sizes(cut), cut.group.size()
    by_rank = x.view(*x.shape[:-2], ranks, x.shape[-2] // ranks, x.shape[-1]).movedim(-3, 0).flatten(0, 1)
    received = _exchanged(by_rank, cut, [x.shape[0]] * ranks, sizes)
    chunks = [chunk for held in cut.chunks for chunk in held]  # in the order in which they are received
    parts = zip(chunks, received.split([*map(len, chunks)]), strict=True)
    return torch.cat([part for _, part in sorted(parts, key=lambda one: one[0].start)])


def to_tokens(x: torch.Tensor, cut: Cut) -> torch.Tensor:
    """What ``to_heads`` gives, back."""
    own, ranks = sum(cut.sizes()), cut.group.size()
    by_rank = torch.cat([x[chunk.start : chunk.stop] for held in cut.chunks for chunk in held])
    received = _exchanged(by_rank, cut, _sizes(cut), [own] * ranks)
    return received.view(ranks, own, *x.shape[1:]).movedim(0, -3).flatten(-3, -2)


def _sizes(cut: Cut) -> list[int]:
    """How many tokens the shard of each rank has."""
    return [sum(map(len, chunks)) for chunks in cut.chunks]


def _exchanged(x: torch.Tensor, cut: Cut, given: list[int], taken: list[int]) -> torch.Tensor:
    received: torch.Tensor = _Exchange.apply(x, cut.group, given, taken)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """Rows from each rank, ``taken`` of them, for rows to each rank, ``given``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, given: list[int], taken: list[int]) -> torch.Tensor:
        ctx.call = group, given, taken
        received = x.new_empty(sum(taken), *x.shape[1:])
        if is_explaining():
            return received
        with waiting(group, "exchanging heads with the others"):
            dist.all_to_all_single(received, x.contiguous(), taken, given, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dreceived: torch.Tensor) -> Any:
        group, given, taken = ctx.call
        return _Exchange.apply(dreceived, group, taken, given), None, None, None  # type: ignore[no-untyped-call]
