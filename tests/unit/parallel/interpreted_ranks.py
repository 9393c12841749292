"""Forks the ranks of a module of this folder, and prints how many ended well, as JSON.

Run as a script with TRITON_INTERPRET=1: ``interpreted_ranks.py MODULE RANKS FILE``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module

import torch
import torch.distributed as dist


def run(rank: int, module: str, ranks: int, file: str) -> None:
    """One rank, in a group of all."""
    main = import_module(f"tests.unit.parallel.{module}").main
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    main(group, file)


def main(module: str, ranks: int, file: str) -> None:
    import_module(f"tests.unit.parallel.{module}")  # once, for all
    running = set[int]()
    for rank in range(ranks):
        if not (forked := os.fork()):
            run(rank, module, ranks, file)
        running.add(forked)
    while running:
        ended, status = os.wait()
        running.remove(ended)
        if status:
            for one in running:  # which may wait for it
                os.kill(one, signal.SIGKILL)
        assert status == 0
    print(json.dumps(ranks))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
