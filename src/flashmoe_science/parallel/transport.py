"""What carries rows between ranks: each has tensors of one size for all others, or one for each other."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.moe.pytorch import weighted_sums
from flashmoe_science.parallel.agree import waiting

# ``torch.distributed`` renames it in 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Transport(Protocol):
    """``selective``: whether ``summed`` receives only the rows that it sums."""

    selective: bool

    def gather(self, *own: torch.Tensor) -> list[torch.Tensor]:
        """Each tensor [L, ...] of all ranks in their order, [N * L, ...]; contiguous, of one shape on all ranks."""
        ...

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """[N * L, ...], what this rank is given by each in their order, of x [N * L, ...], what it has for each."""
        ...

    def summed(
        self, x: torch.Tensor, tokens: int, weights: torch.Tensor | None = None, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[tokens, H], sums of rows of ``exchange(x)``, in fp32 and in their order.

        Args:
            weights: [tokens, K], of each row; None for 1.
            places: [tokens, K], the rows of each sum, -1 for none; None for those of a token of each rank, in their order.
        """
        ...


class Collectives:
    """The transport by collectives of torch.distributed."""

    selective = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather(self, *own: torch.Tensor) -> list[torch.Tensor]:
        everyones = [one.new_empty(self._group.size() * one.shape[0], *one.shape[1:]) for one in own]
        with waiting(self._group, "gathering the ranks' rows"):
            for every, one in zip(everyones, own, strict=True):
                _all_gather(every, one, group=self._group)
        return everyones

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        with waiting(self._group, "exchanging rows with the others"):
            dist.all_to_all_single(received, x, group=self._group)
        return received

    def summed(
        self, x: torch.Tensor, tokens: int, weights: torch.Tensor | None = None, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        received = self.exchange(x)
        if places is None:
            places = torch.arange(received.shape[0], device=x.device).view(self._group.size(), -1)[:, :tokens].t()
        return sums_of(received, weights, places)

    def __repr__(self) -> str:
        return f"collectives of {dist.get_backend(self._group)}"


def sums_of(rows: torch.Tensor, weights: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
    """[T, H], the sums of the rows at the places, as of ``Transport.summed``."""
    if not rows.is_cuda or TRITON_MISSING or rows.dtype == torch.float64:
        found = of_places(rows, places)
        if weights is not None:
            return weighted_sums(found, weights, places >= 0)
        first, *rest = found.unbind(1)
        total = first.to(torch.promote_types(rows.dtype, torch.float32))
        for part in rest:
            total = total + part
        return total.to(rows.dtype)
    from flashmoe_science.ops.moe.combine import combined  # it brings Triton

    return combined(rows, weights, places)


def of_places(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[T, K, H], the rows at the places [T, K]; zeros where a place is below 0."""
    return torch.where((places >= 0)[:, :, None], rows[places.clamp(min=0)], 0.0)
