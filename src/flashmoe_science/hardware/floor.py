"""The physical floor: the least time that a chip could take for a problem. A time below it is no measurement."""

from __future__ import annotations

from typing import Literal

from flashmoe_science.hardware.gpus import GPUS, Gpu
from flashmoe_science.problem import Problem

# Boards may run above the clock that their datasheet's peak rates are computed at (an H200 at 1980 MHz, its peak at 1830).
_HEADROOM = 1.10
_UNLISTED_HEADROOM = 4.0  # over the fastest chip listed: no chip of the next years does more


def floor_ns(problem: Problem, gpu: Gpu | None, cache: Literal["cold", "warm"]) -> float:
    """The least time in nanoseconds that the chip could take for one call.

    The arithmetic at the dense 16-bit tensor rate, the fastest there is for any of our dtypes, and, where the L2 is cold, the
    inputs read once at the memory's bandwidth, whichever takes longer. The output is left out: it may still lie in the L2 when
    a call ends. None for ``gpu`` is a chip that the table lacks, or a CPU: four times the fastest rates of the table.
    """
    gpus, headroom = ([gpu], _HEADROOM) if gpu else (list(GPUS.values()), _UNLISTED_HEADROOM)
    arithmetic = problem.flops() / max(one.tensor_flops_16bit for one in gpus)
    traffic = _bytes_read(problem, gpus) / max(one.memory_bandwidth for one in gpus) if cache == "cold" else 0.0
    return 1e9 * max(arithmetic, traffic) / headroom


def _bytes_read(problem: Problem, gpus: list[Gpu]) -> int:
    """At the least. Where only the sum with the output is known, the L2 may hold as much of that as it can."""
    known = problem.input_bytes()
    return known if known is not None else max(0, problem.min_bytes() - max(one.l2_bytes for one in gpus))
