"""Forks the ranks of a module of this folder, and prints how many ended well, as JSON.

Run as a script with TRITON_INTERPRET=1: ``interpreted_ranks.py MODULE RANKS FILE``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module


def main(module: str, ranks: int, file: str) -> None:
    rank_of, running = import_module(f"tests.unit.parallel.{module}").main, set[int]()
    for rank in range(ranks):
        if not (forked := os.fork()):
            rank_of(rank, ranks, file)
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
