"""Prints what an eager call at S = 128 costs the host, in microseconds: ours, then PyTorch's."""

from __future__ import annotations

import statistics
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


if __name__ == "__main__":
    q, k, v = (torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    with torch.no_grad():
        print(microseconds(lambda: fm.scaled_dot_product_attention(q, k, v)))
        print(microseconds(lambda: F.scaled_dot_product_attention(q, k, v)))
