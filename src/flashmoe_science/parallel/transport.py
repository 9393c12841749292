"""What carries rows between ranks: each has one tensor of one size for all others, or for each other."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from flashmoe_science.parallel.agree import waiting

# ``torch.distributed`` renames it in 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Transport(Protocol):
    """``start``, ``rate``: seconds that an exchange takes at least, and bytes a second received beyond, between two H100 of one
    host; None where not known."""

    start: float | None
    rate: float

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """[N * L, ...], the tensors [L, ...] of all ranks in their order; contiguous ones, all of one shape."""
        ...

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """[N * L, ...], what this rank is given by each in their order, of x [N * L, ...], what it has for each."""
        ...


class Collectives:
    """By the collectives of torch.distributed."""

    rate = 260e9  # NCCL 2.28

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.start: float | None = 70e-6 if "nccl" in dist.get_backend(group) else None

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        everyones = own.new_empty(self._group.size() * own.shape[0], *own.shape[1:])
        with waiting(self._group, "gathering the ranks' rows"):
            _all_gather(everyones, own, group=self._group)
        return everyones

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        with waiting(self._group, "exchanging rows with the others"):
            dist.all_to_all_single(received, x, group=self._group)
        return received

    def __repr__(self) -> str:
        return f"collectives of {dist.get_backend(self._group)}"
