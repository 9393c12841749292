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

    The arithmetic at the fastest dense rate, and, where the L2 is cold, the inputs read once at the memory's bandwidth,
    whichever takes longer; of several GPUs, each its share. The output is left out: it may still be in the L2 when a call ends.
    None for ``gpu`` is a chip that the table lacks, or a CPU: four times the fastest rates of the table.

    No method that is accurate enough (``Problem.arithmetic``) is faster than that rate:

    8-bit, 4-bit    what the tensor cores do of the faster format of that width.
    16-bit          half the 8-bit rate; on GeForce cards that is fp16 with fp16 sums, twice the rate with fp32 sums. Parts of
                    8 bits do not help: bf16 and fp16 need two or more an operand, and so two products or more.
    fp32            the CUDA cores, and in addition the tensor cores with the time of two 16-bit products for each: TF32 takes
                    as long, where a contract allows it; of parts that together have fp32's accuracy fp16 needs three products,
                    bf16 six, TF32 three, int8 six at twice the rate.

    A method of fewer products (Strassen's has 7 for 8) would have to reach 96% of the datasheet's rate to be refused.
    """
    gpus, headroom = ([gpu], _HEADROOM) if gpu else (list(GPUS.values()), _UNLISTED_HEADROOM)
    arithmetic = problem.flops() / max(one.fastest_flops(problem.arithmetic()) for one in gpus)
    traffic = _bytes_read(problem, gpus) / max(one.memory_bandwidth for one in gpus) if cache == "cold" else 0.0
    return 1e9 * max(arithmetic, traffic) / headroom / problem.gpus()


def _bytes_read(problem: Problem, gpus: list[Gpu]) -> int:
    """The minimum number of bytes read. Where only the sum with the output is known, the L2 may hold as much of that as it
    can."""
    input_bytes = problem.input_bytes()
    return input_bytes if input_bytes is not None else max(0, problem.min_bytes() - max(one.l2_bytes for one in gpus))
