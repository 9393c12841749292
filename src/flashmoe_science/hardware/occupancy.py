"""How many blocks of a kernel are resident on an SM, what limits it, and how a grid fills the GPU in waves.

The allocation rules are those of NVIDIA's occupancy calculator (the CUDA toolkit's cuda_occupancy.h and Nsight Compute's) for
compute capability 8.0 and up; the Best Practices Guide, "Calculating Occupancy", works two examples of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashmoe_science.hardware.gpus import KIB, MAX_REGISTERS_PER_THREAD, MAX_THREADS_PER_BLOCK, REGISTERS_PER_BLOCK, WARP, Gpu

SUBPARTITIONS = 4  # of an SM, each with a scheduler and a quarter of the registers
REGISTER_UNIT = 256  # a warp's registers are allocated in such steps: 8 a thread
SHARED_UNIT = 128  # bytes
RESERVED_SHARED = 1 * KIB  # bytes that the system reserves in addition to each block's own, on 8.0 and up


@dataclass(frozen=True, slots=True)
class Residency:
    """Blocks that an SM holds at once. ``limits`` gives, for each resource, how many blocks it alone would allow."""

    blocks: int
    warps: int  # resident on an SM
    max_warps: int
    limits: dict[str, int]
    reason: str  # what limits it, in words with the numbers

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that hold it to so few blocks."""
        return tuple(name for name, limit in self.limits.items() if limit == self.blocks)

    @property
    def occupancy(self) -> float:
        """Resident warps over the most that an SM can hold."""
        return self.warps / self.max_warps


@dataclass(frozen=True, slots=True)
class Waves:
    """How a grid fills the GPU, in rounds. ``last_fill`` is how full the last one is (1.0: no tail)."""

    count: float
    last_fill: float
    efficiency: float  # work over the time of whole rounds: 1.0 without a tail
    idle_sms: int  # SMs that never get a block

    def __str__(self) -> str:
        words = f"{self.count:.2f} waves, the last one {self.last_fill:.0%} full, {self.efficiency:.0%} of the time used"
        return f"{words}; {self.idle_sms} SMs get no block" if self.idle_sms else words


def kilobytes(count: int) -> str:
    """Bytes in KB of 1,024, to the byte and without trailing zeros: 58112 is "56.75 KB"."""
    return f"{count / KIB:.3f}".rstrip("0").rstrip(".") + " KB"


def residency(gpu: Gpu, *, threads: int, registers: int, shared_bytes: int) -> Residency:
    """Resident blocks per SM of a kernel with such blocks. ``threads``: in a block, 1 or more. ``registers``: a thread's.
    ``shared_bytes``: a block's, static and dynamic together."""
    warps = _cdiv(threads, WARP)
    max_warps = gpu.max_threads_per_sm // WARP
    limits = {
        "registers": _register_limit(gpu, registers, warps),
        "shared memory": _shared_limit(gpu, shared_bytes),
        "threads": max_warps // warps if threads <= MAX_THREADS_PER_BLOCK else 0,
        "blocks": gpu.max_blocks_per_sm,
    }
    blocks = min(limits.values())
    reserved = kilobytes(shared_bytes + RESERVED_SHARED)
    words = {
        "registers": f"{registers} registers x {threads} threads of {gpu.registers_per_sm}",
        "shared memory": f"{reserved} with the 1 KB reserved, of {kilobytes(gpu.shared_per_sm)}",
        "threads": f"{threads} threads of {gpu.max_threads_per_sm}",
        "blocks": f"at most {gpu.max_blocks_per_sm}",
    }
    reason = "; ".join(f"{name} ({words[name]})" for name, limit in limits.items() if limit == blocks)
    return Residency(blocks, blocks * warps, max_warps, limits, reason)


def waves(gpu: Gpu, grid_blocks: int, resident_blocks: int) -> Waves:
    """Rounds in which ``grid_blocks`` blocks of equal length run, ``resident_blocks`` (1 or more) at once on each SM."""
    at_once = gpu.sm_count * resident_blocks
    rounds = _cdiv(grid_blocks, at_once)
    last = grid_blocks - (rounds - 1) * at_once
    return Waves(
        count=grid_blocks / at_once,
        last_fill=last / at_once,
        efficiency=grid_blocks / (rounds * at_once),
        idle_sms=max(0, gpu.sm_count - grid_blocks),
    )


def shared_verdict(gpu: Gpu, shared_bytes: int) -> str:
    """A block's shared memory compared with the static limit and the opt-in limit, as text."""
    size, static, opt_in = kilobytes(shared_bytes), kilobytes(gpu.shared_per_block_static), kilobytes(gpu.shared_per_block)
    if shared_bytes <= gpu.shared_per_block_static:
        return f"{size}: within the {static} that a block gets without asking"
    on = f"on {gpu.product}"
    if shared_bytes <= gpu.shared_per_block:
        return f"{size}: above the {static} that a block gets without asking, within the {opt_in} it may ask for {on}"
    return f"{size}: above the {opt_in} that a block may ask for {on}"


def block_refusal(gpu: Gpu, *, threads: int, registers: int, shared_bytes: int) -> str | None:
    """None where one such block can be launched on the GPU, else why not."""
    if shared_bytes > gpu.shared_per_block:
        return f"shared memory is {shared_verdict(gpu, shared_bytes)}"
    if threads > MAX_THREADS_PER_BLOCK:
        return f"{threads} threads in a block; the most is {MAX_THREADS_PER_BLOCK}"
    if registers > MAX_REGISTERS_PER_THREAD:
        return f"{registers} registers a thread; the most is {MAX_REGISTERS_PER_THREAD}"
    if _register_limit(gpu, registers, _cdiv(threads, WARP)) == 0:
        return f"{registers} registers x {threads} threads do not fit the {gpu.registers_per_sm} registers of an SM"
    return None


def _register_limit(gpu: Gpu, registers: int, warps: int) -> int:
    if registers > MAX_REGISTERS_PER_THREAD:
        return 0
    per_warp = _round_up(max(registers, 1) * WARP, REGISTER_UNIT)
    # The launch is checked as if each subpartition took an equal share of the block's warps.
    if per_warp * _round_up(warps, SUBPARTITIONS) > REGISTERS_PER_BLOCK:
        return 0
    return gpu.registers_per_sm // SUBPARTITIONS // per_warp * SUBPARTITIONS // warps


def _shared_limit(gpu: Gpu, shared_bytes: int) -> int:
    if shared_bytes > gpu.shared_per_block:
        return 0
    return gpu.shared_per_sm // _round_up(shared_bytes + RESERVED_SHARED, SHARED_UNIT)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(value: int, step: int) -> int:
    return _cdiv(value, step) * step
