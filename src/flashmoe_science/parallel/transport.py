"""Transport of rows between ranks: equal tensors for all other ranks, or one for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.distributed as dist

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.moe.call import Rows
from flashmoe_science.ops.moe.pytorch import weighted_sums
from flashmoe_science.parallel.agree import waiting
from flashmoe_science.parallel.cost import MESSAGES, Link

# ``torch.distributed`` renames them in 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_INTEGERS = {4: torch.int32, 8: torch.int64}  # by bytes: what ids travel as


class Sizes(NamedTuple):
    """Sizes of a rank's calls: at most T tokens, width H, K choices a token, experts of a rank, dtype of rows."""

    tokens: int
    hidden: int
    top_k: int
    experts: int
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype of routing weights on their way, and of sums."""
        return torch.promote_types(self.dtype, torch.float32)


class Transport(ABC):
    """``link``: the time of a forward's exchanges on the device, between two GPUs of one host; None if unknown. ``sends``:
    whether it has ``sent``, by which an exact result receives only the rows that it sums."""

    link: Link | None
    sends = False

    def __init__(self, group: dist.ProcessGroup, sizes: Sizes) -> None:
        self._group, self._sizes = group, sizes
        self._ranks, self._rank = group.size(), group.rank()

    @abstractmethod
    def dispatch(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, kept: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states [N * T, H], weights and ids [N * T, K] of all ranks in order, T places each, from this rank's [tokens,
        ...]. Ids count from this rank's first expert; those of other experts and of empty places are out of range. Unless
        ``kept``, the next call may overwrite them."""

    @abstractmethod
    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[N * T, H], of this rank's x [tokens, H]; zeros in empty places."""

    @abstractmethod
    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """[N * L, ...] from all ranks in order, for x [N * L, ...], this rank's part for each. The next call may overwrite the
        result."""

    def summed(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """[tokens, ...], the sums of ``exchange(x)`` of each token, in fp32 and in the order of the ranks."""
        received = self.exchange(x)
        return sums_of(received, None, torch.arange(len(received), device=x.device).view(self._ranks, -1)[:, :tokens].t())

    def sent(self, rows: Rows, of_all: torch.Tensor | None, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[tokens, H], a call's results, from rows that go straight from the products to their tokens' ranks. ``of_all``: all
        ranks' weights for a reduced result; None for an exact one. ``weights``, ``ids``: this rank's."""
        raise NotImplementedError


class Collectives(Transport):
    """By the collectives of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, sizes: Sizes) -> None:
        super().__init__(group, sizes)
        self.link = MESSAGES if "nccl" in dist.get_backend(group) else None

    def dispatch(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, kept: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, _, top_k, experts, _ = self._sizes
        wide = self._sizes.wide
        # An id of 64 bits may have another's lower half.
        in_range = ids.clamp(-1, self._ranks * experts).to(_INTEGERS[wide.itemsize]) + 1  # in empty places 0, as weights
        routing = torch.cat((in_range, weights.to(wide).view(in_range.dtype)), 1)
        everyones_x, routing = gathered(self._group, self._padded(x), self._padded(routing, 0))
        return everyones_x, routing[:, top_k:].contiguous().view(wide), routing[:, :top_k] - (self._rank * experts + 1)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return gathered(self._group, self._padded(x, 0))[0]

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        with waiting(self._group, "exchanging rows with the others"):
            dist.all_to_all_single(received, x, group=self._group)
        return received

    def summed(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        if self._ranks > 2:
            return super().summed(x, tokens)
        out = x.new_empty(len(x) // self._ranks, *x.shape[1:])  # a sum of two has one order, and is rounded once
        with waiting(self._group, "adding up rows with the others"):
            _reduce_scatter(out, x, group=self._group)
        return out[:tokens]

    def _padded(self, own: torch.Tensor, fill: int | None = None) -> torch.Tensor:
        """A tensor [tokens, ...] as [T, ...], contiguous; the rest is ``fill``, or undefined."""
        if (tokens := own.shape[0]) < self._sizes.tokens:
            places = own.new_empty(self._sizes.tokens, *own.shape[1:])
            places[:tokens] = own
            if fill is not None:
                places[tokens:] = fill
            own = places
        return own.contiguous()

    def __repr__(self) -> str:
        return f"collectives of {dist.get_backend(self._group)}"


def gathered(group: dist.ProcessGroup, *own: torch.Tensor) -> list[torch.Tensor]:
    """For each tensor [L, ...], contiguous and of one shape on all ranks: [N * L, ...], all ranks' in order."""
    everyones = [one.new_empty(group.size() * one.shape[0], *one.shape[1:]) for one in own]
    with waiting(group, "gathering the ranks' rows"):
        for every, one in zip(everyones, own, strict=True):
            _all_gather(every, one, group=group)
    return everyones


def sums_of(rows: torch.Tensor, weights: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
    """[T, H], the sums of rows [R, H] at the places [T, K], in fp32 (fp64 of fp64) and in their order; -1: none. ``weights``:
    [T, K], of each row; None for 1."""
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
