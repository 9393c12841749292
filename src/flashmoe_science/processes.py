"""Jobs in worker processes, which end when their parent does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

T = TypeVar("T")
_LOOK_EVERY_S = 1.0


def end_with_parent() -> None:
    """Watch the parent in a thread and end within a second or so of it, even if it was killed: nothing else ends an idle
    process of a pool, which would keep a GPU's memory for good."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def processors() -> int:
    """How many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_out(
    function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], workers: int, begin: Callable[[], None] | None = None
) -> Iterator[tuple[int, T]]:
    """``function(*job)`` for every job, in ``workers`` processes: (index of the job, result), in order of completion.

    ``begin`` is called first in each process. What ``function`` raises is raised here. A job that kills its process ends the
    iteration. When the iteration ends, so have all processes.
    """
    # "spawn": a CUDA context does not survive a fork, and a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(begin,))
    try:
        futures: dict[Future[T], int] = {pool.submit(function, *job): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        return
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(begin: Callable[[], None] | None) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent answers it
    if begin is not None:
        begin()
