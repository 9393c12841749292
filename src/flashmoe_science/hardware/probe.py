"""The GPU of this machine: what it is and its state now. The package's only query of a device.

Importing this module touches no GPU. ``current_gpu`` asks PyTorch, ``telemetry`` asks NVML (nvidia-ml-py).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashmoe_science.hardware.gpus import Gpu, gpu_for_device

if TYPE_CHECKING:
    import torch

POWER_CAP = "power cap"
_ASSUMED: ContextVar[_Assumed | None] = ContextVar("assumed GPU", default=None)
# NVML's clock event reasons that are throttling, as text. Not among them: an idle GPU, and clocks set by a user.
_THROTTLING = {
    0x0000_0000_0000_0004: POWER_CAP,
    0x0000_0000_0000_0008: "hardware slowdown",
    0x0000_0000_0000_0010: "held to another GPU's clock (sync boost)",
    0x0000_0000_0000_0020: "thermal (software)",
    0x0000_0000_0000_0040: "thermal (hardware)",
    0x0000_0000_0000_0080: "power brake (hardware)",
}


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A GPU at one moment. None where the driver does not report it."""

    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Assumed:
    """The GPU of one context of ``assume``, equal to no other's."""

    gpu: Gpu


@contextmanager
def assume(gpu: Gpu) -> Iterator[None]:
    """A context in which every device is ``gpu``, which need not be here."""
    before = _ASSUMED.set(_Assumed(gpu))
    try:
        yield
    finally:
        _ASSUMED.reset(before)


def is_assumed() -> bool:
    """Whether a GPU is assumed: tensors may then be on a device that computes nothing."""
    return _ASSUMED.get() is not None


def place_of(device: torch.device) -> Hashable:
    """The key of a device's plans: the device, or the context in which a GPU is assumed, as they serve nothing else."""
    return _ASSUMED.get() or device


def current_gpu(device: torch.device | None = None) -> Gpu | None:
    """The NVIDIA GPU that ``device`` names, by default the current one; None without one (or with another maker's)."""
    import torch

    if (assumed := _ASSUMED.get()) is not None:
        return assumed.gpu
    # On ROCm, torch.cuda is an AMD GPU whose "capability" looks like an NVIDIA one.
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return _gpu_at(_index(device))


def gpu_of(tensor: torch.Tensor) -> Gpu | None:
    """The NVIDIA GPU that a tensor is on; None for one on the CPU (or on another maker's GPU)."""
    return current_gpu(tensor.device) if tensor.is_cuda or is_assumed() else None


def telemetry(device: torch.device | None = None) -> Telemetry:
    """Clocks, temperature, power and throttling of a GPU now; nothing of them where NVML is absent."""
    try:
        handle = _nvml_handle(_index(device))
    except _nvml_error():
        return Telemetry()
    nvml = _nvml()
    power = _ask(nvml.nvmlDeviceGetPowerUsage, handle)
    return Telemetry(
        sm_clock_mhz=_ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        temperature_c=_ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000,
        throttle=throttle_words(_ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0),
    )


def driver_version() -> str | None:
    """The NVIDIA driver's version, None where NVML is absent."""
    try:
        _nvml().nvmlInit()
        return str(_nvml().nvmlSystemGetDriverVersion())
    except _nvml_error():
        return None


def throttle_words(reasons: int) -> tuple[str, ...]:
    """NVML's bit mask of clock event reasons, as words; only those that are throttling."""
    return tuple(word for bit, word in _THROTTLING.items() if reasons & bit)


def _index(device: torch.device | None) -> int:
    import torch

    return torch.cuda.current_device() if device is None or device.index is None else device.index


@functools.cache
def _gpu_at(index: int) -> Gpu:
    import torch

    facts: Any = torch.cuda.get_device_properties(index)  # its type stub lacks some of the fields
    clock, bandwidth = _rates(index)
    return gpu_for_device(
        facts.name,
        (facts.major, facts.minor),
        facts.multi_processor_count,
        memory_bytes=facts.total_memory,
        l2_bytes=facts.L2_cache_size,
        registers_per_sm=facts.regs_per_multiprocessor,
        max_threads_per_sm=facts.max_threads_per_multi_processor,
        shared_per_sm=facts.shared_memory_per_multiprocessor,
        shared_per_block=facts.shared_memory_per_block_optin,
        boost_clock_hz=clock,
        memory_bandwidth=bandwidth,
    )


def _rates(index: int) -> tuple[float | None, float | None]:
    """Highest SM clock in hertz and memory bandwidth in bytes/s, None where NVML does not report it."""
    try:
        handle = _nvml_handle(index)
    except _nvml_error():
        return None, None
    nvml = _nvml()
    sm_mhz = _ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    memory_mhz = _ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM)
    bus_bits = _ask(nvml.nvmlDeviceGetMemoryBusWidth, handle)
    # Two transfers a clock: an L4's 6,251 MHz x 192 bits are its 300 GB/s.
    bandwidth = None if memory_mhz is None or bus_bits is None else 2 * memory_mhz * 1e6 * bus_bits / 8
    return None if sm_mhz is None else sm_mhz * 1e6, bandwidth


def _nvml() -> Any:
    import pynvml

    return pynvml


def _nvml_error() -> type[Exception]:
    error: type[Exception] = _nvml().NVMLError
    return error


@functools.cache
def _nvml_handle(index: int) -> Any:
    """NVML's handle of PyTorch's device ``index``. By UUID: CUDA_VISIBLE_DEVICES renumbers PyTorch's devices, not NVML's."""
    import torch

    _nvml().nvmlInit()
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return _nvml().nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def _ask(query: Any, *args: Any) -> Any:
    """One NVML query; None where this card or driver does not support it."""
    try:
        return query(*args)
    except _nvml_error():
        return None
