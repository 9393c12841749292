"""The machine that a run measures on: one NVIDIA GPU, or the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import POWER_CAP, Telemetry, current_gpu, telemetry

_MOST_WORDS = 10_000  # characters of an exception in which a line that says something is looked for


@dataclass(frozen=True, slots=True)
class Bench:
    """``gpu`` is None where the CPU does the work."""

    device: torch.device
    gpu: Gpu | None

    def synchronize(self) -> None:
        if self.gpu is not None:
            torch.cuda.synchronize(self.device)

    def telemetry(self) -> Telemetry:
        """Clocks, temperature, power and throttling now; on a CPU, nothing but that."""
        return Telemetry(absent="a CPU") if self.gpu is None else telemetry(self.device)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """On a CPU, one thread: threads that wait for one another on a busy machine time the machine's other work."""
        threads = torch.get_num_threads()
        if self.gpu is None:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def bench_here() -> Bench:
    """The current GPU, or the CPU where there is none."""
    gpu = current_gpu()
    return Bench(torch.device("cpu"), None) if gpu is None else Bench(torch.device("cuda", torch.cuda.current_device()), gpu)


def conditions(before: Telemetry, after: Telemetry) -> dict[str, Any]:
    """A TimingRow's fields on the GPU's state while its samples were taken, from its state on both sides of them."""
    throttle = {*before.throttle, *after.throttle}
    return {
        "sm_clock_mhz": [mhz for one in (before, after) if (mhz := one.sm_clock_mhz) is not None],
        "temperature_c": after.temperature_c,
        "power_w": after.power_w,
        "throttle": sorted(throttle - {POWER_CAP}),
        "power_capped": POWER_CAP in throttle,
    }


def one_line(error: BaseException) -> str:
    """An exception's first line that says something, with its type, for a record."""
    try:
        lines = [line.strip() for line in str(error)[:_MOST_WORDS].splitlines() if line.strip()]
    except Exception:  # an exception of a candidate's own may fail to say what it is
        lines = []
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
