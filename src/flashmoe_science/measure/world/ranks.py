"""The ranks of a run: what each gives, and the time of a call on all of them at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flashmoe_science.measure.bench import Bench, bench_here
from flashmoe_science.ops.distributed import Implementation

T = TypeVar("T")

_WAIT = timedelta(seconds=120)  # for another rank: a kernel may be built meanwhile


def world_size() -> int:
    """How many ranks torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class World:
    """The ranks of a run. What it gathers goes by gloo, apart from what is timed."""

    def __init__(self) -> None:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        on_gpu = torch.cuda.is_available()
        if on_gpu and torch.cuda.device_count() <= local:
            raise ValueError(f"torchrun started rank {local} of this host, and it has {torch.cuda.device_count()} GPUs")
        if on_gpu:
            torch.cuda.set_device(local)
        else:
            torch.set_num_threads(1)
        self.bench: Bench = bench_here()
        self._made = not dist.is_initialized()
        if self._made:
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_WAIT)
        group = dist.group.WORLD
        assert group is not None
        self.group, self.rank, self.size = group, dist.get_rank(), dist.get_world_size()
        self._host = dist.new_group(backend="gloo", timeout=_WAIT)
        card = torch.cuda.get_device_name() if on_gpu else None
        self.cards = [one for one in self.gather(card) if one is not None]
        if len(set(self.cards)) > 1:
            self.end()
            raise ValueError(f"the ranks' GPUs are {', '.join(self.cards)}; a run needs cards of one kind")
        self._gate = torch.zeros(1, device=self.bench.device)

    def end(self) -> None:
        """Take the group down, where it was made here."""
        if self._made:
            dist.destroy_process_group()

    def gather(self, one: T) -> list[T]:
        """What each rank gives, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, one, group=self._host)
        return found

    def first_of(self, reason: str | None) -> str:
        """The first reason that a rank gives, the same on all; empty where none has one."""
        return next(filter(None, self.gather(reason)), "")

    def time(self, one: Implementation, call: Callable[[], object], calls: int) -> int:
        """Nanoseconds of so many calls on this rank. All ranks begin at once.

        On a GPU half as many calls run first, untimed: the host gets ahead, and the GPU takes the clock of this work. One GPU's
        call of the whole problem is made on every rank: a GPU that idles is slow in the next sample.
        """
        with one.context():
            dist.all_reduce(self._gate)  # on a GPU ranks leave it within microseconds, with the calls queued behind it
            if self.bench.gpu is None:
                began = time.perf_counter_ns()
                for _ in range(calls):
                    call()
                return time.perf_counter_ns() - began
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range((calls + 1) // 2):
                call()
            first.record()
            for _ in range(calls):
                call()
            last.record()
            torch.cuda.synchronize()
            elapsed_ms: float = first.elapsed_time(last)
            return round(elapsed_ms * 1e6)
