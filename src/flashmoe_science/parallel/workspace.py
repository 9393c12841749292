"""What the ranks of a group agree on before experts are spread over them, and what their calls cost."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist

from flashmoe_science.ops.attention.call.checks import check_count
from flashmoe_science.ops.moe.call import DTYPES
from flashmoe_science.parallel.agree import agree
from flashmoe_science.parallel.layout import process_group

Combine = Literal["exact", "reduced"]

_START, _RATE = 70e-6, 260e9  # of a collective of NCCL 2.28 on two H100 of one host: seconds, and bytes a second received
_COLLECTIVES = 3  # of a forward


class ExpertWorkspace:
    """The sizes of the calls of ``expert_parallel_moe``, the same on every rank. Every rank of the group makes it at once.

    With E experts and N ranks, rank r has the experts from r * E / N to (r + 1) * E / N. Its printed form says what carries the
    tokens, the bytes that a rank receives in a call, and the time that they take. It owns no memory: any number of layers and
    calls may share it.

    Args:
        group: a ProcessGroup or a 1-D DeviceMesh. Its time limit, which ``init_process_group`` and ``new_group`` are given, is
            that of each wait for another rank.
        max_tokens: the most that a rank has in a call; each call sends as many.
        hidden: H, the model's width.
        top_k: experts of a token.
        experts: E, of all ranks; a multiple of the number of ranks.
        dtype: of the hidden states.

    Raises:
        TypeError, ValueError: a size below 1, experts that the ranks do not divide, no group that this rank is in; on every
            rank, sizes that differ from another rank's.
    """

    def __init__(
        self, group: object, max_tokens: int, hidden: int, top_k: int, experts: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.group = process_group(group)
        sizes = {"max_tokens": max_tokens, "hidden": hidden, "top_k": top_k, "experts": experts}
        refused = None
        try:
            _check(sizes, dtype, self.group.size())
        except (TypeError, ValueError) as error:
            refused = error
        agree(self.group, {**sizes, "dtype": str(dtype)}, refused)
        self.max_tokens, self.hidden, self.top_k, self.experts, self.dtype = max_tokens, hidden, top_k, experts, dtype
        self.ranks, self.rank = self.group.size(), self.group.rank()

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def first_expert(self) -> int:
        """The first expert of this rank."""
        return self.rank * self.local_experts

    def bytes_received(self, combine: Combine) -> int:
        """Bytes that a rank receives of others in a forward: tokens and their routing, then results."""
        row, wide = self.hidden * self.dtype.itemsize, torch.promote_types(self.dtype, torch.float32).itemsize
        routing = self.top_k * wide * (2 if combine == "reduced" else 1)
        results = row if combine == "reduced" else self.top_k * row
        return (self.ranks - 1) * self.max_tokens * (row + routing + results)

    def seconds(self, combine: Combine) -> float:
        """What a forward's collectives take by NCCL between GPUs of one host: predicted from what two H100 took."""
        return _COLLECTIVES * _START + self.bytes_received(combine) / _RATE

    def __repr__(self) -> str:
        backend, last = dist.get_backend(self.group), self.first_expert + self.local_experts - 1
        costs = []
        for combine in get_args(Combine):
            time = f" in some {1e3 * self.seconds(combine):.2f} ms" if "nccl" in backend else ""
            costs.append(f"{combine}: {self.bytes_received(combine) / 1e6:.1f} MB received{time}")
        return (
            f"ExpertWorkspace(rank {self.rank} of {self.ranks}, experts {self.first_expert} to {last} of {self.experts}; "
            f"at most {self.max_tokens} tokens a rank, hidden={self.hidden}, top_k={self.top_k}, {self.dtype}; "
            f"by collectives of {backend}; a call, {', '.join(costs)})"
        )


def _check(sizes: dict[str, int], dtype: object, ranks: int) -> None:
    for name, size in sizes.items():
        check_count(size, name, 1)
    if sizes["experts"] % ranks:
        raise ValueError(f"experts is {sizes['experts']}; it must be a multiple of the number of ranks, {ranks}")
    if dtype not in (*DTYPES, torch.float64):
        raise TypeError(f"dtype is {dtype!r}; it must be torch.float16, bfloat16, float32 or float64")
