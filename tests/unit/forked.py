"""Ranks of a test, forked from one process that has imported what they run: each by itself, they took longer to import it than
to run it."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import set_forkserver_preload

from torch.multiprocessing import start_processes


def on_ranks(ranks: int, function: Callable[..., None], *given: object) -> None:
    """Call the function of a module with each rank, and with what is given, in a process of its own. Raises what one raises."""
    set_forkserver_preload(["tests.unit.imported"])
    start_processes(function, given, nprocs=ranks, start_method="forkserver")
