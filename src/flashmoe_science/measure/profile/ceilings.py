"""What this machine reaches at one thing at a time: memory, L2, each pipe of a GPU; copies and matrix products on a CPU.

Kernels that do nothing else set the pace (``ceiling_kernels``; PyTorch's own copy and matrix product), timed over long enough
calls. A ceiling is what was reached here, under this machine's clocks and power limit, not a datasheet's.
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
_READ_BLOCK, _PIPE_BLOCK, _SHARED_BLOCK = 4096, 2048, 256  # elements of a program
_WARPS = 8
_BLOCKS_AN_SM = 8  # of 256 threads: every warp that an SM can hold
_ROUNDS = 4096
_UNROLL = 16
_SHARED_LOADS = 8 * 16  # bytes a thread and round in flashmoe_read_shared
_L2_PASSES = 64
_LAUNCHES = 1000
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
    yield Load(
        "dram copy",
        "B/s",
        2 * _CPU_BYTES,
        lambda: target.copy_(source),
        "a copy of 256 MiB, read and write counted, one thread",
    )
    flops = 2 * _CPU_MATRIX**3
    for name, dtype in (("matmul fp32", torch.float32), ("matmul bf16", torch.bfloat16)):
        yield _product(name, dtype, _CPU_MATRIX, flops, torch.device("cpu"))  # type: ignore[arg-type]  # names of ceilings


def _product(name: CeilingName, dtype: torch.dtype, size: int, flops: int, device: torch.device) -> Load:
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, dtype=dtype, device=device)
    return Load(name, "FLOP/s", flops, lambda: torch.mm(left, right, out=out), f"torch.mm of {size} x {size}, random values")


def _gpu_loads(bench: Bench, gpu: Gpu) -> Iterator[Load]:
    stream_bytes = max(_DRAM_L2S * gpu.l2_bytes, _LEAST_STREAM)
    source = torch.ones(stream_bytes // 4, device=bench.device)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes
    yield Load(
        "dram copy", "B/s", moved, lambda: target.copy_(source), f"torch copy of {source.nbytes} bytes, both ways counted"
    )
    yield _reading("dram read", source, 1, gpu)
    yield _reading("l2 read", torch.ones(gpu.l2_bytes // 4 // 4, device=bench.device), _L2_PASSES, gpu)
    for name, dtype in (("tensor bf16", torch.bfloat16), ("tensor fp16", torch.float16)):
        yield _product(name, dtype, _MATRIX, 2 * _MATRIX**3, bench.device)  # type: ignore[arg-type]  # as above
    yield from _pipes(bench, gpu)
    yield _launches(bench)


def _launches(bench: Bench) -> Load:
    from flashmoe_science.measure.profile.ceiling_kernels import flashmoe_nothing

    values = torch.empty(1, device=bench.device)
    flashmoe_nothing[(1,)](values)  # compiled before it is captured
    bench.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            flashmoe_nothing[(1,)](values)
    return Load(
        "empty launch", "op/s", _LAUNCHES, graph.replay, f"{_LAUNCHES} empty kernels, one after another in a CUDA graph"
    )


def _reading(name: CeilingName, source: torch.Tensor, passes: int, gpu: Gpu) -> Load:
    from flashmoe_science.measure.profile.ceiling_kernels import flashmoe_read

    programs = gpu.sm_count * _BLOCKS_AN_SM
    tiles = source.numel() // _READ_BLOCK
    sums = torch.empty(programs, device=source.device)

    def call() -> object:
        return flashmoe_read[(programs,)](source, sums, tiles, REPEATS=passes, BLOCK=_READ_BLOCK, num_warps=_WARPS)

    work = passes * tiles * _READ_BLOCK * 4
    return Load(
        name, "B/s", work, call, f"{tiles * _READ_BLOCK * 4} bytes read {passes} times over by {programs} blocks, past the L1"
    )


def _pipes(bench: Bench, gpu: Gpu) -> Iterator[Load]:
    """Registers only, or shared memory only: enough warps and independent chains to keep a pipe full."""
    from flashmoe_science.measure.profile.ceiling_kernels import flashmoe_exp2, flashmoe_multiply_add, flashmoe_read_shared

    programs = gpu.sm_count * _BLOCKS_AN_SM
    values = torch.rand(programs * _PIPE_BLOCK, device=bench.device)
    steps = programs * _PIPE_BLOCK * _ROUNDS * _UNROLL
    arithmetic = {"BLOCK": _PIPE_BLOCK, "UNROLL": _UNROLL, "num_warps": _WARPS}
    chains = f"{_PIPE_BLOCK // 32 // _WARPS} independent chains a thread, {programs} blocks of {32 * _WARPS} threads"
    yield Load(
        "fma fp32", "FLOP/s", 2 * steps, lambda: flashmoe_multiply_add[(programs,)](values, _ROUNDS, **arithmetic),
        f"fused multiply-adds, two FLOPs each: {chains}",
    )  # fmt: skip
    yield Load(
        "exp2", "op/s", steps, lambda: flashmoe_exp2[(programs,)](values, _ROUNDS, **arithmetic), f"exp2: {chains}"
    )  # fmt: skip
    words = torch.empty(programs * _SHARED_BLOCK, dtype=torch.int32, device=bench.device)
    yield Load(
        "shared read", "B/s", programs * _SHARED_BLOCK * _ROUNDS * _SHARED_LOADS,
        lambda: flashmoe_read_shared[(programs,)](words, _ROUNDS, BLOCK=_SHARED_BLOCK, num_warps=_WARPS),
        f"16-byte loads without bank conflicts, {programs} blocks of {_SHARED_BLOCK} threads",
    )  # fmt: skip
