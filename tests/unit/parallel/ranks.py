"""One rank of several, which runs all cases of this folder."""

from __future__ import annotations

import os
import time

import torch.distributed as dist
from tests.unit.parallel import context_ranks, decode_ranks, expert_ranks, ring_ranks


def main(group: dist.ProcessGroup, file: str) -> None:
    found = context_ranks.found(group) | ring_ranks.found(group) | expert_ranks.found(group) | decode_ranks.found(group)
    if group.size() == 4:
        from tests.unit.parallel import sharded_ranks  # it imports FSDP and checkpoints, which take seconds

        found["sharded"] = sharded_ranks.faults(group, f"{file}-state")
    dist.barrier(group)
    if group.rank() == group.size() - 1:
        time.sleep(0.5)  # the others have passed the barrier
    else:
        found["a rank that has ended"] = expert_ranks.check_ended(group)
    assert not any(found.values()), found
    os._exit(0)  # as killed, the last while the others wait for it, who cannot take their group down then
