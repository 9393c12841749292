"""The machine that a run measures on (one NVIDIA GPU or the CPU), its software and the package's source, for a run's header."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import flashmoe_science
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.hardware.probe import POWER_CAP, Telemetry, current_gpu, driver_version, telemetry
from flashmoe_science.records import Environment

_MAX_WORDS = 10_000  # characters of an exception that are searched for its first line of text


@dataclass(frozen=True, slots=True)
class Bench:
    """``gpu`` is None where the CPU does the work."""

    device: torch.device
    gpu: Gpu | None

    def synchronize(self) -> None:
        if self.gpu is not None:
            torch.cuda.synchronize(self.device)

    def telemetry(self) -> Telemetry:
        """Clocks, temperature, power and throttling of the GPU now; nothing of them on a CPU."""
        return Telemetry() if self.gpu is None else telemetry(self.device)

    @contextmanager
    def single_threaded(self) -> Iterator[None]:
        """Use one thread on a CPU: on a busy machine a call's threads would wait for one another, and so for other work."""
        threads = torch.get_num_threads()
        if self.gpu is None:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def bench_here() -> Bench:
    """The current GPU, or the CPU where there is none."""
    gpu = current_gpu()
    return Bench(torch.device("cpu"), None) if gpu is None else Bench(torch.device("cuda", torch.cuda.current_device()), gpu)


def conditions(before: Telemetry, after: Telemetry) -> dict[str, Any]:
    """A TimingRow's fields on the state of the GPU, from its telemetry before and after the samples."""
    throttle = {*before.throttle, *after.throttle}
    return {
        "sm_clock_mhz": [mhz for one in (before, after) if (mhz := one.sm_clock_mhz) is not None],
        "temperature_c": after.temperature_c,
        "power_w": after.power_w,
        "throttle": sorted(throttle - {POWER_CAP}),
        "power_capped": POWER_CAP in throttle,
    }


def one_line(error: BaseException) -> str:
    """An exception's type and its first line that is not empty, for a record."""
    try:
        lines = [line.strip() for line in str(error)[:_MAX_WORDS].splitlines() if line.strip()]
    except Exception:  # str() of a candidate's own exception may raise
        lines = []
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


PACKAGES = (
    "fa3-fwd",
    "flash-attn-4",
    "flashinfer-python",
    "nvidia-cutlass-dsl",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "numpy",
)
_SOURCE = Path(flashmoe_science.__file__).parent


def environment(bench: Bench) -> Environment:
    """The hardware and software of a run, as a record needs it to repeat a number."""
    packages = {name: found for name in PACKAGES if (found := _version(name))}
    gpu: dict[str, Any] = {"gpu": None}
    if bench.gpu is not None:
        card = torch.cuda.get_device_properties(bench.device)
        gpu = {"gpu": card.name, "gpu_memory_bytes": card.total_memory, "sm_count": card.multi_processor_count}
        gpu |= {"driver": driver_version(), "cuda": torch.version.cuda}
        if torch.backends.cudnn.is_available():
            packages["cudnn"] = str(torch.backends.cudnn.version())
    return Environment(
        **gpu,
        cpu=_cpu_name(),
        cpu_count=os.cpu_count() or 1,
        platform=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        packages=packages,
    )


def source_digest() -> str:
    """SHA-256 over the package's source files, names and contents, in order of name."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCE.rglob("*")):
        if path.suffix in (".py", ".json", ".jinja") and path.is_file():
            digest.update(b"\0".join((path.relative_to(_SOURCE).as_posix().encode(), path.read_bytes(), b"")))
    return digest.hexdigest()


def commit() -> str | None:
    """The checkout's commit, with "+dirty" where the package's files differ from it. Outside a checkout, as in a container with
    the files alone, FLASHMOE_COMMIT or None: it is the source digest that binds a run to its source."""
    tracked = _git("ls-files", "--error-unmatch", "__init__.py")  # installed into someone else's checkout, it is not
    head = _git("rev-parse", "HEAD") if tracked else None
    if head is None:
        return os.environ.get("FLASHMOE_COMMIT") or None
    return f"{head}+dirty" if _git("status", "--porcelain", "--", ".") else head


def _version(distribution: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def _cpu_name() -> str:
    with suppress(OSError):  # not Linux
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", *arguments], cwd=_SOURCE, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()
    return None
