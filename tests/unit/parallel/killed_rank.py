"""One of two GPUs' ranks is killed between calls; the other must end by itself, and say why.

python -m tests.unit.parallel.killed_rank WHAT RANK FILE LIMIT_MS
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from flashmoe_science.parallel import (
    ContextWorkspace,
    DecodeWorkspace,
    ExpertWorkspace,
    context_attention,
    context_decode,
    expert_parallel_moe,
    merge,
    symmetric,
)

KILLED, CALLS = 20, 40  # the call before which rank 1 ends, of so many


def experts(group: dist.ProcessGroup) -> Callable[[], object]:
    workspace = ExpertWorkspace(group, 64, 256, 4, 16, transport="symmetric")
    x, weights = torch.randn(64, 256, device="cuda").bfloat16(), torch.rand(64, 4, device="cuda")
    ids = torch.randint(16, (64, 4), device="cuda", dtype=torch.int32)
    up, down = (torch.randn(8, 256, width, device="cuda").bfloat16() for width in (256, 128))
    return lambda: expert_parallel_moe(x, up, down, weights, ids, workspace=workspace)


def context(group: dist.ProcessGroup) -> Callable[[], object]:
    workspace = ContextWorkspace(group, 2 * 256 * 2 * 64 * 2)
    qkv = [torch.randn(1, 256, heads, 64, device="cuda").bfloat16() for heads in (4, 2, 2)]
    return lambda: context_attention(*qkv, group=group, causal=True, workspace=workspace)


def decoding(group: dist.ProcessGroup) -> Callable[[], object]:
    workspace = DecodeWorkspace(group, 1, 8, 64)
    q, *caches = (torch.randn(1, tokens, heads, 64, device="cuda").bfloat16() for tokens, heads in ((1, 8), (300, 2), (300, 2)))
    lengths = torch.full((1,), 500, device="cuda", dtype=torch.int32)
    return lambda: context_decode(q, *caches, group=group, cache_seqlens=lengths, workspace=workspace)


WHATS = {"experts": experts, "context": context, "decoding": decoding}


def main(what: str, rank: int, file: str, limit_ms: int) -> None:
    symmetric.TIME_LIMIT_MS = merge.TIME_LIMIT_MS = limit_ms
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    call = WHATS[what](group)
    for one in range(CALLS):
        if (one, rank) == (KILLED, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        call()
        torch.cuda.synchronize()
    print("all calls ended")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
