"""Specifications of the GPUs that kernels are built for, with a source for every number.

Sources, by the short names used below:

guide       CUDA Programming Guide, "Compute Capabilities", table "Technical Specifications per Compute Capability".
datasheet   NVIDIA's product datasheet of that card; rates "with sparsity" are halved here.
whitepaper  NVIDIA's architecture whitepaper: A100 (2020), GA102 (2021), Ada (2023), H100 (2023), RTX Blackwell (2025).
driver      what CUDA's device properties or NVML report on such a card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from flashmoe_science.problem import Arithmetic

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

MAX_THREADS_PER_BLOCK = 1024  # guide, every capability
MAX_REGISTERS_PER_THREAD = 255  # guide, every capability
REGISTERS_PER_BLOCK = 64 * KIB  # guide, every capability
WARP = 32


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
    tensor_flops_8bit: float  # the faster of fp8 and int8, however they are accumulated
    tensor_flops_4bit: float  # the faster of fp4 and int4; of 8 bits where there is neither
    fp32_flops: float  # without tensor cores
    boost_clock_hz: float

    @property
    def arch(self) -> str:
        return f"sm_{self.compute_capability[0]}{self.compute_capability[1]}"

    def fastest_flops(self, arithmetic: Arithmetic) -> float:
        """The most FLOP/s of products of that accuracy, by whatever method; ``hardware.floor`` says why no method has more."""
        return {
            "fp32": self.fp32_flops + self.tensor_flops_8bit / 4,
            "16-bit": self.tensor_flops_8bit / 2,
            "8-bit": self.tensor_flops_8bit,
            "4-bit": self.tensor_flops_4bit,
        }[arithmetic]


@dataclass(frozen=True, slots=True)
class _Capability:
    """What one compute capability fixes. The rates are FLOP per SM and clock: the fastest card of that capability."""

    warps_per_sm: int
    blocks_per_sm: int
    shared_per_sm: int
    tensor_rate: int
    tensor_rate_4bit: int
    fp32_rate: int


# Warps, blocks and shared memory: guide. Rates: whitepapers (tensor: 16-bit inputs, fp32 accumulation, dense; 8-bit ones have
# twice it; 4-bit ones are int4 or fp4, which Hopper lacks. GeForce cards of 8.6, 8.9 and 12.0 run at half the tensor rate given
# here, but where fp16 is accumulated in fp16).
_CAPABILITIES: dict[tuple[int, int], _Capability] = {
    (8, 0): _Capability(64, 32, 164 * KIB, 2048, 8192, 128),
    (8, 6): _Capability(48, 16, 100 * KIB, 1024, 4096, 256),
    (8, 7): _Capability(48, 16, 164 * KIB, 2048, 8192, 256),
    (8, 9): _Capability(48, 24, 100 * KIB, 1024, 4096, 256),
    (9, 0): _Capability(64, 32, 228 * KIB, 4096, 8192, 256),
    (10, 0): _Capability(64, 32, 228 * KIB, 8192, 32768, 256),
    (10, 3): _Capability(64, 32, 228 * KIB, 8192, 65536, 256),
    (11, 0): _Capability(48, 24, 228 * KIB, 8192, 32768, 256),
    (12, 0): _Capability(48, 24, 100 * KIB, 1024, 4096, 256),
    (12, 1): _Capability(48, 24, 100 * KIB, 1024, 4096, 256),
}


def _limits(capability: tuple[int, int]) -> dict[str, int]:
    """The fields of a Gpu that its compute capability fixes."""
    limits = _CAPABILITIES[capability]
    return {
        "registers_per_sm": 64 * KIB,  # guide, every capability
        "max_threads_per_sm": limits.warps_per_sm * WARP,
        "max_blocks_per_sm": limits.blocks_per_sm,
        "shared_per_sm": limits.shared_per_sm,
        "shared_per_block": limits.shared_per_sm - 1 * KIB,  # guide: all but 1 KB, which the system keeps
        "shared_per_block_static": 48 * KIB,  # guide, every capability
    }


def _gpu(name: str, product: str, capability: tuple[int, int], **own: Any) -> Gpu:
    rates = _CAPABILITIES[capability]
    own["tensor_flops_4bit"] = own["tensor_flops_8bit"] * rates.tensor_rate_4bit / (2 * rates.tensor_rate)
    return Gpu(name, product, capability, **_limits(capability), **own)


_TABLE = (
    _gpu("a100", "NVIDIA A100-SXM4-80GB", (8, 0),
        sm_count=108,  # whitepaper
        l2_bytes=40 * MIB,  # whitepaper
        memory_bytes=80 * GIB,  # driver: 81,920 MiB
        memory_bandwidth=2.039e12,  # datasheet
        tensor_flops_16bit=312e12,  # datasheet
        tensor_flops_8bit=624e12,  # datasheet: int8
        fp32_flops=19.5e12,  # datasheet
        boost_clock_hz=1.410e9,  # whitepaper
    ),
    _gpu("a10", "NVIDIA A10", (8, 6),
        sm_count=72,  # datasheet: 9,216 CUDA cores, 128 an SM
        l2_bytes=6 * MIB,  # driver: 6,291,456
        memory_bytes=23_609_475_072,  # driver
        memory_bandwidth=600e9,  # datasheet
        tensor_flops_16bit=125e12,  # datasheet
        tensor_flops_8bit=250e12,  # datasheet: int8
        fp32_flops=31.2e12,  # datasheet
        boost_clock_hz=1.695e9,  # driver
    ),
    _gpu("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6),
        sm_count=82,  # whitepaper
        l2_bytes=6 * MIB,  # whitepaper
        memory_bytes=25_286_672_384,  # driver
        memory_bandwidth=936e9,  # whitepaper
        tensor_flops_16bit=71e12,  # whitepaper: with fp32 accumulation, half of that with fp16's
        tensor_flops_8bit=284e12,  # whitepaper: int8
        fp32_flops=35.6e12,  # whitepaper
        boost_clock_hz=1.695e9,  # whitepaper
    ),
    _gpu("l4", "NVIDIA L4", (8, 9),
        sm_count=58,  # driver
        l2_bytes=48 * MIB,  # driver: 50,331,648
        memory_bytes=23_612_293_120,  # driver; 24 GB on the datasheet
        memory_bandwidth=300e9,  # datasheet
        tensor_flops_16bit=121e12,  # datasheet: 242 with sparsity
        tensor_flops_8bit=242.5e12,  # datasheet: 485 with sparsity
        fp32_flops=30.3e12,  # datasheet
        boost_clock_hz=2.040e9,  # driver
    ),
    _gpu("l40s", "NVIDIA L40S", (8, 9),
        sm_count=142,  # driver
        l2_bytes=96 * MIB,  # whitepaper
        memory_bytes=45_589 * MIB,  # driver; 48 GB on the datasheet
        memory_bandwidth=864e9,  # datasheet
        tensor_flops_16bit=362.05e12,  # datasheet
        tensor_flops_8bit=733e12,  # datasheet
        fp32_flops=91.6e12,  # datasheet
        boost_clock_hz=2.520e9,  # whitepaper
    ),
    _gpu("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9),
        sm_count=128,  # driver
        l2_bytes=72 * MIB,  # driver
        memory_bytes=24_563 * MIB,  # driver
        memory_bandwidth=1008e9,  # whitepaper
        tensor_flops_16bit=165.2e12,  # whitepaper: with fp32 accumulation, half of that with fp16's
        tensor_flops_8bit=660.6e12,  # whitepaper: int8, and fp8 with fp16 accumulation
        fp32_flops=82.6e12,  # whitepaper
        boost_clock_hz=2.520e9,  # whitepaper
    ),
    _gpu("h100", "NVIDIA H100 80GB HBM3", (9, 0),
        sm_count=132,  # driver
        l2_bytes=50 * MIB,  # driver
        memory_bytes=81_090 * MIB,  # driver
        memory_bandwidth=3.35e12,  # datasheet, SXM
        tensor_flops_16bit=989.4e12,  # datasheet, SXM: 1,979 with sparsity; whitepaper: at 1,830 MHz
        tensor_flops_8bit=1979e12,  # datasheet, SXM: 3,958 with sparsity
        fp32_flops=66.9e12,  # datasheet, SXM
        boost_clock_hz=1.980e9,  # driver: the highest SM clock; matrix products sustain 1,830 MHz at most (whitepaper)
    ),
    _gpu("h200", "NVIDIA H200", (9, 0),
        sm_count=132,  # driver
        l2_bytes=60 * MIB,  # driver
        memory_bytes=143_771 * MIB,  # driver
        memory_bandwidth=4.8e12,  # datasheet
        tensor_flops_16bit=989e12,  # datasheet: 1,979 with sparsity
        tensor_flops_8bit=1979e12,  # datasheet: 3,958 with sparsity
        fp32_flops=67e12,  # datasheet
        boost_clock_hz=1.980e9,  # driver: the highest SM clock
    ),
    _gpu("b200", "NVIDIA B200", (10, 0),
        sm_count=148,  # driver
        l2_bytes=126 * MIB,  # driver
        memory_bytes=182_642 * MIB,  # driver
        memory_bandwidth=8e12,  # datasheet, DGX B200: 64 TB/s over 8 GPUs
        tensor_flops_16bit=2.25e15,  # datasheet, HGX B200: 36 PFLOP/s with sparsity over 8 GPUs
        tensor_flops_8bit=4.5e15,  # datasheet, HGX B200: 72 PFLOP/s with sparsity over 8 GPUs
        fp32_flops=75e12,  # datasheet, HGX B200: 600 TFLOP/s over 8 GPUs
        boost_clock_hz=1.965e9,  # driver: the highest SM clock
    ),
    _gpu("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0),
        sm_count=170,  # whitepaper
        l2_bytes=96 * MIB,  # whitepaper: 98,304 KB
        memory_bytes=32 * GIB,  # whitepaper
        memory_bandwidth=1792e9,  # whitepaper
        tensor_flops_16bit=209.5e12,  # whitepaper: with fp32 accumulation
        tensor_flops_8bit=838e12,  # whitepaper: int8, and fp8 with fp16 accumulation
        fp32_flops=104.8e12,  # whitepaper
        boost_clock_hz=2.407e9,  # whitepaper
    ),
)  # fmt: skip

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}


def _plain(text: str) -> str:
    """Lower case letters and digits, without what only some write: the maker, the brand, the socket, the size of the memory."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    return re.sub(r"nvidia|geforce|rtx|tesla|tensorcore|gpu|sxm[45]?|80gb|141gb", "", plain)


_BY_PLAIN_NAME = {_plain(word): gpu for gpu in _TABLE for word in (gpu.name, gpu.product)}


def gpu_named(text: str) -> Gpu:
    """The table's GPU of that name: short ("l4") or the product's ("NVIDIA L4"), in any case. Raises ValueError: no such GPU;
    the message lists the names."""
    found = listed(text)
    if found is None:
        raise ValueError(f"gpu is {text!r}; it must be one of {', '.join(GPUS)}")
    return found


def listed(text: str) -> Gpu | None:
    """As ``gpu_named``; None if there is no such GPU."""
    return _BY_PLAIN_NAME.get(_plain(text))


def short_name(product: str, sm_count: int | None) -> str:
    """A card's name in the table, else a slug of its product's. Other SMs than the table's are part of the name: a partition,
    or a wrong product, is not the card that was measured."""
    found = listed(product)
    if found is None:
        return re.sub(r"[^a-z0-9]+", "-", product.lower().removeprefix("nvidia ")).strip("-") or "unnamed"
    return found.name if sm_count in (None, found.sm_count) else f"{found.name}-{sm_count}sm"


def gpu_for_device(product: str, capability: tuple[int, int], sm_count: int, **reported: Any) -> Gpu:
    """The GPU of an actual card: the table's where product, capability and SM count agree, else one built from the report.

    What the driver does not report is filled in so that nothing true is refused and nothing is launched that may not fit:
    limits from the nearest older capability that the table has, rates from the fastest card that it could be. ``product``: the
    driver's name for the card. ``capability``: (major, minor). ``reported``: further fields of a Gpu; None where the driver
    does not report it.
    """
    known = listed(product)
    if known is not None and (known.compute_capability, known.sm_count) == (capability, sm_count):
        return known
    nearest = max((key for key in _CAPABILITIES if key <= capability), default=min(_CAPABILITIES))
    fields: dict[str, Any] = _limits(nearest) | {
        "memory_bandwidth": max(gpu.memory_bandwidth for gpu in _TABLE),
        "boost_clock_hz": max(gpu.boost_clock_hz for gpu in _TABLE) if known is None else known.boost_clock_hz,
    }
    fields |= {name: value for name, value in reported.items() if value is not None}
    rates, cycles = _CAPABILITIES[nearest], sm_count * fields["boost_clock_hz"]
    return Gpu(
        name=short_name(product, sm_count),
        product=product,
        compute_capability=capability,
        sm_count=sm_count,
        tensor_flops_16bit=cycles * rates.tensor_rate,
        tensor_flops_8bit=cycles * 2 * rates.tensor_rate,
        tensor_flops_4bit=cycles * rates.tensor_rate_4bit,
        fp32_flops=cycles * rates.fp32_rate,
        **fields,
    )


def why_no_triton(gpu: Gpu | None) -> str | None:
    """Why a Triton kernel cannot run there (None is the CPU), in words; None where it can."""
    if gpu is None:
        return "Triton kernels need a GPU"
    if gpu.compute_capability < (8, 0):
        return f"needs compute capability 8.0 or newer; {gpu.product} has {'.'.join(map(str, gpu.compute_capability))}"
    return None


def why_no_hopper(gpu: Gpu | None) -> str | None:
    """Why a Gluon kernel for Hopper cannot run there (None is the CPU), in words; None where it can."""
    if gpu is None:
        return "Gluon kernels need a GPU"
    if gpu.compute_capability != (9, 0):
        return f"needs compute capability 9.0 (H100, H200); {gpu.product} has {'.'.join(map(str, gpu.compute_capability))}"
    return None
