"""Times that cannot be: a number is refused rather than recorded."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.measure.inputs import input_bytes
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.problem import Problem
from flashmoe_science.records import Cache

_EXPECTED_WITHIN = 2.0  # the full bench may be at most twice, at least half, what the quick bench found


def floor_ns(problem: Problem, gpu: Gpu | None, cache: Cache) -> float:
    """The least time that the chip could take, in nanoseconds; 0 on a CPU, whose peak is not known here.

    Arithmetic at the dense 16-bit tensor rate (the fastest there is for any of our dtypes) and, where the L2 is cold, reading
    its inputs once. Writing the output is left out: it may still lie in the L2 when a call ends.
    """
    if gpu is None:
        return 0.0
    arithmetic = problem.flops() / gpu.tensor_flops_16bit
    traffic = _bytes_read(problem, gpu) / gpu.memory_bandwidth if cache == "cold" else 0.0
    return 1e9 * max(arithmetic, traffic)


def _bytes_read(problem: Problem, gpu: Gpu) -> int:
    """At the least. Of what is not attention the sum with the output is known: the L2 may hold as much of that as it can."""
    if isinstance(problem, AttentionProblem):
        return input_bytes(problem)
    return max(0, problem.min_bytes() - gpu.l2_bytes)


def impossible(samples: Sequence[int], floor: float, expected: float | None) -> str | None:
    """Why these samples (nanoseconds a call) are no measurement, or None where nothing speaks against them."""
    if min(samples) <= 0:
        return "a sample took no time at all"
    median = statistics.median(samples)
    if median < floor:
        return f"{median:.0f} ns a call is below the {floor:.0f} ns that the chip's arithmetic and bandwidth allow"
    if expected is not None and not expected / _EXPECTED_WITHIN <= median <= expected * _EXPECTED_WITHIN:
        return f"the full bench found {median:.0f} ns a call where the quick bench found {expected:.0f} ns"
    return None
