"""Prints what eager calls cost the host, in microseconds: ``short``, ``masked``, or ``growing KERNEL slices|anew``."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import flashmoe_science as fm


def microseconds(call: Callable[[], object], calls: int = 200, samples: int = 15) -> float:
    """Median host time of a call, the queue never full."""
    times = []
    for _ in range(samples):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def short() -> tuple[float, float]:
    """At S = 128: ours, PyTorch's."""
    q, k, v = (torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    return (
        microseconds(lambda: fm.scaled_dot_product_attention(q, k, v)),
        microseconds(lambda: F.scaled_dot_product_attention(q, k, v)),
    )


def masked() -> tuple[float, float]:
    """At S = 128 with a bias of each head: ours, PyTorch's."""
    q, k, v = (torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    bias = torch.randn(1, 4, 128, 128, device="cuda", dtype=torch.float16)
    return (
        microseconds(lambda: fm.scaled_dot_product_attention(q, k, v, bias)),
        microseconds(lambda: F.scaled_dot_product_attention(q, k, v, bias)),
    )


def growing(kernel: str, way: str) -> tuple[float, float, float]:
    """Medians over 200 tokens of a call whose cache has grown by one, a new length each: ours, PyTorch's; and how many plans.

    The first pass makes the plans, which is mostly compilation; the second finds them, and no call bound.
    """
    from flashmoe_science.ops import calls
    from flashmoe_science.ops.attention.front import choose, operator

    times: list[float] = []
    pytorchs: list[float] = []
    for _ in range(2):
        cache = torch.randn(2, 1, 8, 200, 64, device="cuda", dtype=torch.float16)
        q = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.float16)
        calls.LAUNCHES.clear()
        operator.SEEN.clear()
        times.clear()
        for length in range(1, 201):
            k, v = (one[:, :, :length] if way == "slices" else one[:, :, :length].clone() for one in cache)
            torch.cuda.synchronize()
            start = time.perf_counter()
            fm.scaled_dot_product_attention(q, k, v, kernel=kernel)
            times.append((time.perf_counter() - start) * 1e6)
            torch.cuda.synchronize()
            start = time.perf_counter()
            F.scaled_dot_product_attention(q, k, v)
            pytorchs.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times), statistics.median(pytorchs), float(len(choose.PLANS))


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    with torch.no_grad():
        print(*{"short": short, "masked": masked, "growing": growing}[what](*rest))
