"""The sizes that ranks agree on before experts are spread over them, and the cost of their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.distributed as dist

from flashmoe_science.ops.checks import check_count
from flashmoe_science.ops.moe.call import DTYPES
from flashmoe_science.parallel.agree import agreed
from flashmoe_science.parallel.cost import Cost
from flashmoe_science.parallel.layout import process_group
from flashmoe_science.parallel.symmetric import is_on_one_host, why_no_symmetric
from flashmoe_science.parallel.transport import Collectives, Sizes, Transport

Combine = Literal["exact", "reduced"]
Transports = Literal["collectives", "symmetric"]


class ExpertWorkspace:
    """The sizes of ``expert_parallel_moe``'s calls, the same on every rank. All ranks of the group make it together.

    With E experts and N ranks, rank r has the experts from r * E / N to (r + 1) * E / N. Printed, it says what carries the
    tokens, the bytes that a rank receives in a call, and how long they take. Any number of layers and calls may share it.

    Args:
        group: a ProcessGroup or a 1-D DeviceMesh. Its time limit (``timeout`` of ``init_process_group`` and ``new_group``)
            holds for each wait for another rank.
        max_tokens: the most that a rank has in a call; each call sends that many.
        hidden: H, the model's width.
        top_k: experts of a token.
        experts: E, of all ranks; a multiple of the number of ranks.
        dtype: of the hidden states.
        transport: "collectives", of torch.distributed, or "symmetric": on one host and one stream, kernels write into a buffer
            of each other GPU, of some N * max_tokens * (K + 1) * H elements. A wait for a rank then ends after 60 s with an
            error that ends the CUDA context: restart all ranks. Default: symmetric, which is faster, if all ranks are GPUs of
            one host with NCCL; else collectives.

    Raises:
        TypeError, ValueError: a size below 1, experts that the ranks do not divide, no group that this rank is in, an unknown
            transport; on every rank, if the ranks' sizes differ.
        RuntimeError: PyTorch has no symmetric memory here.
    """

    def __init__(
        self,
        group: object,
        max_tokens: int,
        hidden: int,
        top_k: int,
        experts: int,
        dtype: torch.dtype = torch.bfloat16,
        transport: Transports | None = None,
    ) -> None:
        self.group = process_group(group)
        sizes = {"max_tokens": max_tokens, "hidden": hidden, "top_k": top_k, "experts": experts}
        with agreed(self.group) as facts:
            facts |= {**sizes, "dtype": str(dtype), "transport": transport}
            _check(sizes, dtype, self.group.size())
            _check_transport(transport, self.group)
        if transport is None:
            transport = "symmetric" if not why_no_symmetric(self.group) and is_on_one_host(self.group) else "collectives"
        self.max_tokens, self.hidden, self.top_k, self.experts, self.dtype = max_tokens, hidden, top_k, experts, dtype
        self.ranks, self.rank = self.group.size(), self.group.rank()
        by: Callable[[dist.ProcessGroup, Sizes], Transport] = Collectives
        if transport == "symmetric":
            from flashmoe_science.parallel.peers import Peers as by  # it brings Triton
        self.transport = by(self.group, Sizes(max_tokens, hidden, top_k, self.local_experts, dtype))

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def first_expert(self) -> int:
        """The first expert of this rank."""
        return self.rank * self.local_experts

    def cost(self, combine: Combine) -> Cost:
        """Of a forward: tokens and routing, then results. For an eager call of few tokens the host takes longer."""
        row, wide = self.hidden * self.dtype.itemsize, torch.promote_types(self.dtype, torch.float32).itemsize
        results = row if combine == "reduced" else self.top_k * row
        if combine == "exact" and self.transport.sends:
            results //= self.ranks  # the rows of a rank's experts, where choices are even
        received = (self.ranks - 1) * self.max_tokens * (row + 2 * self.top_k * wide + results)
        return Cost.by(self.transport.link, received)

    def __repr__(self) -> str:
        last = self.first_expert + self.local_experts - 1
        costs = (f"{combine}: {self.cost(combine)}" for combine in get_args(Combine))
        return (
            f"ExpertWorkspace(rank {self.rank} of {self.ranks}, experts {self.first_expert} to {last} of {self.experts}; "
            f"at most {self.max_tokens} tokens a rank, hidden={self.hidden}, top_k={self.top_k}, {self.dtype}; "
            f"by {self.transport}; a call, {', '.join(costs)})"
        )


def _check(sizes: dict[str, int], dtype: object, ranks: int) -> None:
    for name, size in sizes.items():
        check_count(size, name, 1)
    if sizes["experts"] % ranks:
        raise ValueError(f"experts is {sizes['experts']}; it must be a multiple of the number of ranks, {ranks}")
    if dtype not in (*DTYPES, torch.float64):
        raise TypeError(f"dtype is {dtype!r}; it must be torch.float16, bfloat16, float32 or float64")


def _check_transport(transport: object, group: dist.ProcessGroup) -> None:
    if transport not in (None, *get_args(Transports)):
        raise ValueError(f"transport is {transport!r}; it must be one of collectives, symmetric, or None")
    if transport == "symmetric" and (words := why_no_symmetric(group)):
        raise ValueError(f"transport is 'symmetric', and {words}; it must be 'collectives'")
