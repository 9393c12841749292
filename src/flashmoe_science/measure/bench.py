"""The machine that a session measures on: one NVIDIA GPU, or the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import POWER_CAP, Telemetry, current_gpu, telemetry
from flashmoe_science.kernel import Config, Kernel
from flashmoe_science.ops.attention.inputs import AttentionInputs, AttentionOutput

Call = Callable[[AttentionInputs], Any]

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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel with one of its configs."""

    kernel: Kernel
    config: Config

    @property
    def name(self) -> str:
        return self.kernel.name

    def __str__(self) -> str:
        return f"{self.kernel.name} ({self.config})" if len(self.config) else self.kernel.name

    def run(self, inputs: AttentionInputs) -> AttentionOutput:
        return self.kernel.run(inputs, self.config)

    def planned(self, like: AttentionInputs) -> Call:
        """A call that plans once, for inputs like ``like``, and then only allocates the output and launches.

        A kernel without a plan (a peer) is called as it is.
        """
        kernel, config = self.kernel, self.config
        if kernel.plan is None:
            return lambda inputs: kernel.run(inputs, config)
        from flashmoe_science.ops.launch import allocate_output

        launcher = kernel.plan(replace(like, out=allocate_output(like).out), config)

        def call(inputs: AttentionInputs) -> AttentionOutput:
            result = allocate_output(inputs)
            launcher(inputs.q, inputs.k, inputs.v, result.out, result.lse, inputs.softmax_scale)
            return result

        return call


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
