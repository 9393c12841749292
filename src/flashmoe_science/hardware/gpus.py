"""Specifications of the GPUs that kernels are built for, a source beside every number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a kernel's build and launch depend on. Bytes, hertz and FLOP/s; rates are dense, without sparsity."""

    name: str  # short, as `--gpu` takes it
    product: str
    compute_capability: tuple[int, int]
    sm_count: int
    registers_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    shared_per_sm: int
    shared_per_block: int  # by opt-in
    shared_per_block_static: int  # without asking
    l2_bytes: int
    memory_bytes: int
    memory_bandwidth: float  # bytes/s
    tensor_flops_16bit: float  # fp16 and bf16 with fp32 accumulation
    fp32_flops: float
    boost_clock_hz: float

    @property
    def arch(self) -> str:
        return f"sm_{self.compute_capability[0]}{self.compute_capability[1]}"
