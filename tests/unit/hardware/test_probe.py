"""The device probe, with a driver played by the test; what it asks of a real one is in the GPU test at the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from flashmoe_science.hardware import probe
from flashmoe_science.hardware.gpus import GPUS, MIB


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A machine with an H200 whose answers a test may change."""
    facts = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=143_771 * MIB,
        L2_cache_size=60 * MIB,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        shared_memory_per_multiprocessor=233472,
        shared_memory_per_block_optin=232448,
        uuid="1234",
    )
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetClockInfo": 1755,
        "nvmlDeviceGetMaxClockInfo": 1980,
        "nvmlDeviceGetMemoryBusWidth": 6144,
        "nvmlDeviceGetTemperature": 41,
        "nvmlDeviceGetPowerUsage": 312_500,
        "nvmlDeviceGetCurrentClocksEventReasons": 0,
        "nvmlSystemGetDriverVersion": "580.159.04",
    }

    def answer(name: str) -> Any:
        def query(*_args: Any) -> Any:
            if isinstance(answers[name], Exception):
                raise answers[name]
            return answers[name]

        return query

    for name in answers:
        monkeypatch.setattr(pynvml, name, answer(name))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: facts)
    for cached in (probe._gpu_at, probe._nvml_handle):
        cached.cache_clear()
    yield SimpleNamespace(facts=facts, answers=answers)
    for cached in (probe._gpu_at, probe._nvml_handle):
        cached.cache_clear()


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe.current_gpu() is None


def test_a_gpu_that_is_not_here_is_assumed_in_a_context_and_after_it_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tensor = torch.empty(1, device="meta")
    with probe.assume(GPUS["b200"]):
        assert probe.current_gpu() is probe.current_gpu(tensor.device) is probe.gpu_of(tensor) is GPUS["b200"]
    assert probe.current_gpu() is probe.gpu_of(tensor) is None


def test_the_listed_card(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.current_gpu() is probe.current_gpu(torch.device("cuda", 0)) is GPUS["h200"]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert probe.current_gpu() is None, "an AMD GPU is not taken for NVIDIA's"


def test_an_unlisted_card_gets_its_bandwidth_from_nvml(machine: SimpleNamespace) -> None:
    machine.facts.name = "NVIDIA H20"
    machine.facts.multi_processor_count = 78
    machine.answers["nvmlDeviceGetMaxClockInfo"] = 2619
    gpu = probe.current_gpu()
    assert gpu is not None
    assert (gpu.name, gpu.sm_count) == ("h20", 78)
    assert gpu.memory_bandwidth == pytest.approx(2 * 2619e6 * 6144 / 8)


def test_telemetry(machine: SimpleNamespace) -> None:
    assert probe.telemetry() == probe.Telemetry(1755, 41, 312.5, ())


def test_telemetry_without_nvml_is_empty(machine: SimpleNamespace) -> None:
    machine.answers["nvmlInit"] = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert probe.telemetry() == probe.Telemetry()
    assert probe.driver_version() is None


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (pynvml.nvmlClocksEventReasonGpuIdle | pynvml.nvmlClocksEventReasonApplicationsClocksSetting, ()),
        (pynvml.nvmlClocksEventReasonSwPowerCap, ("power cap",)),
        (pynvml.nvmlClocksEventReasonHwSlowdown, ("hardware slowdown",)),
        (
            pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonSwThermalSlowdown,
            ("thermal (software)", "thermal (hardware)"),
        ),
        (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, ("power brake (hardware)",)),
    ],
)
def test_throttling_in_words(reasons: int, words: tuple[str, ...]) -> None:
    assert probe.throttle_words(reasons) == words


def test_importing_touches_no_gpu() -> None:
    """Neither torch nor NVML is even imported: a process that forks later must not hold a CUDA context."""
    code = "import sys, flashmoe_science.hardware.probe; sys.exit('torch' in sys.modules or 'pynvml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
def test_this_machines_gpu() -> None:
    gpu = probe.current_gpu()
    assert gpu is not None
    properties: Any = torch.cuda.get_device_properties(0)
    assert gpu.sm_count == properties.multi_processor_count
    assert gpu.shared_per_block == properties.shared_memory_per_block_optin
    assert gpu.shared_per_sm == properties.shared_memory_per_multiprocessor
    assert gpu.max_threads_per_sm == properties.max_threads_per_multi_processor
    assert gpu.registers_per_sm == properties.regs_per_multiprocessor
    assert gpu.l2_bytes == properties.L2_cache_size
    found = probe.telemetry()
    assert found.sm_clock_mhz is not None
