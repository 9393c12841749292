"""What this machine reaches at one thing at a time: memory and matrix products. The other pipes of a GPU have the ceilings that
its maker states (``judge.diagnose.ceilings``).

PyTorch's own copy, sum and matrix product set the pace, timed over long enough calls. A ceiling is what was reached here, under
this machine's clocks and power limit, not a datasheet's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from flashmoe_science.hardware.gpus import MIB, Gpu
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


@dataclass(frozen=True, slots=True)
class Load:
    """One thing to be done as fast as it goes: ``call`` does ``work`` units of it."""

    name: CeilingName
    unit: CeilingUnit
    work: int
    call: Callable[[], object]
    how: str


def measure_ceilings(run: str, bench: Bench, tell: Callable[[str], None]) -> Iterator[CeilingRow]:
    """Measure every ceiling of the bench, one row each. ``tell`` hears what is being measured."""
    for load in _cpu_loads() if bench.gpu is None else _gpu_loads(bench, bench.gpu):
        tell(f"ceiling: {load.name}")
        one = eager_sampler(bench, operator.call, InputSets((load.call,), "warm"), _SAMPLE_NS)
        samples = [max(1, round(one.sample())) for _ in range(SAMPLES)]
        yield CeilingRow(run=run, name=load.name, unit=load.unit, work=load.work, samples=samples, how=load.how)
    if bench.gpu is not None:
        torch.cuda.empty_cache()  # kernels are run in other processes, which want the memory


def _cpu_loads() -> Iterator[Load]:
    source = torch.ones(_CPU_BYTES // 4)
    target = torch.empty_like(source)
    how = "a copy of 256 MiB, read and write counted, one thread"
    yield Load("dram copy", "B/s", 2 * _CPU_BYTES, lambda: target.copy_(source), how)
    for name, dtype in (("matmul fp32", torch.float32), ("matmul bf16", torch.bfloat16)):
        yield _product(name, dtype, _CPU_MATRIX, torch.device("cpu"))  # type: ignore[arg-type]  # names of ceilings


def _product(name: CeilingName, dtype: torch.dtype, size: int, device: torch.device) -> Load:
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, dtype=dtype, device=device)
    return Load(
        name, "FLOP/s", 2 * size**3, lambda: torch.mm(left, right, out=out), f"torch.mm of {size} x {size}, random values"
    )


def _gpu_loads(bench: Bench, gpu: Gpu) -> Iterator[Load]:
    stream_bytes = max(_DRAM_L2S * gpu.l2_bytes, _LEAST_STREAM)
    source = torch.ones(stream_bytes // 4, device=bench.device)
    target = torch.empty_like(source)
    how = f"torch copy of {source.nbytes} bytes, both ways counted"
    yield Load("dram copy", "B/s", 2 * source.nbytes, lambda: target.copy_(source), how)
    total = torch.empty((), device=bench.device)
    how = f"torch sum of {source.nbytes} bytes"
    yield Load("dram read", "B/s", source.nbytes, lambda: torch.sum(source, dim=0, out=total), how)
    for name, dtype in (("tensor bf16", torch.bfloat16), ("tensor fp16", torch.float16)):
        yield _product(name, dtype, _MATRIX, bench.device)  # type: ignore[arg-type]  # as above
