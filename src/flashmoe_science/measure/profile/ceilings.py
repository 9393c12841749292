"""What this machine reaches at one thing at a time: memory and matrix products. The other pipes of a GPU have the ceilings that
its maker states (``judge.diagnose.ceilings``).

PyTorch's own copy, sum and matrix product set the pace, timed over long enough calls. A ceiling is what was reached here, under
this machine's clocks and power limit, not a datasheet's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from flashmoe_science.hardware.gpus import MIB
from flashmoe_science.measure.bench import Bench
from flashmoe_science.measure.clocks import eager_sampler
from flashmoe_science.measure.inputs import InputSets
from flashmoe_science.records import CeilingName, CeilingRow, CeilingUnit

SAMPLES = 12
_SAMPLE_NS = 3_000_000
_DRAM_L2S = 16  # a stream so many times the L2 is not served by it
_LEAST_STREAM = 512 * MIB
_MATRIX = 8192
_CPU_BYTES = 256 * MIB  # above the caches of most machines
_CPU_MATRIX = 512


class Load(NamedTuple):
    """One thing to be done as fast as it goes: ``call`` does ``work`` units of it."""

    name: CeilingName
    unit: CeilingUnit
    work: int
    call: Callable[[], object]
    how: str


def measure_ceilings(run: str, bench: Bench, tell: Callable[[str], None]) -> Iterator[CeilingRow]:
    """Measure every ceiling of the bench, one row each. ``tell`` hears what is being measured."""
    for load in _loads(bench):
        tell(f"ceiling: {load.name}")
        one = eager_sampler(bench, operator.call, InputSets((load.call,), "warm"), _SAMPLE_NS)
        samples = [max(1, round(one.sample())) for _ in range(SAMPLES)]
        yield CeilingRow(run=run, name=load.name, unit=load.unit, work=load.work, samples=samples, how=load.how)
    if bench.gpu is not None:
        torch.cuda.empty_cache()  # kernels are run in other processes, which want the memory


def _loads(bench: Bench) -> Iterator[Load]:
    stream_bytes = _CPU_BYTES if bench.gpu is None else max(_DRAM_L2S * bench.gpu.l2_bytes, _LEAST_STREAM)
    source = torch.ones(stream_bytes // 4, device=bench.device)
    target = torch.empty_like(source)
    how = f"torch copy of {stream_bytes} bytes, both ways counted"
    yield Load("dram copy", "B/s", 2 * stream_bytes, lambda: target.copy_(source), how)
    if bench.gpu is None:
        yield _product("matmul fp32", torch.float32, _CPU_MATRIX, bench.device)
        yield _product("matmul bf16", torch.bfloat16, _CPU_MATRIX, bench.device)
        return
    total = torch.empty((), device=bench.device)
    how = f"torch sum of {stream_bytes} bytes"
    yield Load("dram read", "B/s", stream_bytes, lambda: torch.sum(source, dim=0, out=total), how)
    yield _product("tensor bf16", torch.bfloat16, _MATRIX, bench.device)
    yield _product("tensor fp16", torch.float16, _MATRIX, bench.device)


def _product(name: CeilingName, dtype: torch.dtype, size: int, device: torch.device) -> Load:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    how = f"torch.mm of {size} x {size}, random values"
    return Load(name, "FLOP/s", 2 * size**3, lambda: torch.mm(left, right, out=out), how)
