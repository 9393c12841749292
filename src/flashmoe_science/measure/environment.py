"""Where a run takes place and of which source: what its header says."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import flashmoe_science
from flashmoe_science.hardware.probe import driver_version
from flashmoe_science.measure.bench import Bench
from flashmoe_science.records import Environment

PACKAGES = ("fa3-fwd", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "numpy")
_SOURCE = Path(flashmoe_science.__file__).parent


def environment(bench: Bench) -> Environment:
    """What a reader needs to know of the machine to believe, or to repeat, a number."""
    packages = {name: found for name in PACKAGES if (found := _version(name))}
    gpu: dict[str, Any] = {"gpu": None}
    if bench.gpu is not None:
        properties = torch.cuda.get_device_properties(bench.device)
        gpu = {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "sm_count": properties.multi_processor_count,
        }
        gpu |= {"sm_count": properties.multi_processor_count, "driver": driver_version(), "cuda": torch.version.cuda}
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
            digest.update(f"{path.relative_to(_SOURCE).as_posix()}\0".encode())
            digest.update(path.read_bytes())
            digest.update(b"\0")
    return digest.hexdigest()


def commit() -> str | None:
    """The checkout's commit, "+dirty" after it where the package's files differ from it.

    Outside a checkout: what FLASHMOE_COMMIT says (a container that was given the files alone), or None. The source digest is
    what binds a run to a source; the commit is where to look for it.
    """
    tracked = _git("ls-files", "--error-unmatch", "__init__.py")  # installed into someone else's checkout, it is not
    head = _git("rev-parse", "HEAD") if tracked else None
    if head is None:
        return os.environ.get("FLASHMOE_COMMIT") or None
    return f"{head}+dirty" if _git("status", "--porcelain", "--", ".") else head


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_SOURCE, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
