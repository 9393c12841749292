"""Memory of each GPU that the others of its host read: PyTorch's symmetric memory."""

from __future__ import annotations

import os
import platform

import torch
import torch.distributed as dist

from flashmoe_science.operations import TRITON_MISSING
from flashmoe_science.ops.private import symmetric_memory
from flashmoe_science.parallel.agree import waiting

TIME_LIMIT_MS = 60_000  # of a wait for another rank, after which it ends the CUDA context


class Symmetric:
    """A buffer of ``size`` bytes on every GPU of a group. All ranks make it together. Raises RuntimeError: PyTorch cannot map
    the ranks' memory into each other's."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # PyTorch would create an object that is never used
        symmetric, device = symmetric_memory(), torch.device("cuda", torch.cuda.current_device())
        self.size, self.own = size, symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self.own, group)
        self.addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)

    def of(self, rank: int) -> torch.Tensor:
        """The buffer of a rank."""
        found: torch.Tensor = self._handle.get_buffer(rank, (self.size,), torch.uint8)
        return found

    def barrier(self) -> None:
        """Wait on the current stream until all ranks are here; each then sees what the others wrote before."""
        self._handle.barrier(channel=0, timeout_ms=TIME_LIMIT_MS)


def why_no_symmetric(group: dist.ProcessGroup) -> str:
    """Why a group has no symmetric memory, in words; empty where it may have."""
    if "nccl" not in dist.get_backend(group):
        return f"the group's backend is {dist.get_backend(group)}, and not nccl"
    return TRITON_MISSING or ""


def is_on_one_host(group: dist.ProcessGroup) -> bool:
    """Whether all ranks run on one host. Every rank calls it."""
    hosts = [""] * group.size()
    with waiting(group, "asking for the others' hosts"):
        dist.all_gather_object(hosts, platform.node(), group=group)
    return len(set(hosts)) == 1
