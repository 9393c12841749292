"""Settings of PyTorch and of the process that a call may not leave changed, as they affect every later call in the process; and
side effects that are allowed but reported: random generators moved, files opened for writing.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _python_dispatch

from flashmoe_science.ops.private import private

_UNSEEN = "modes that a call leaves on are not seen"
_FUNCTION_MODES: Callable[[], int] = private("_C._len_torch_function_stack", lambda: 0, _UNSEEN)
_DISPATCH_MODES: Callable[[], int] = private("_C._len_torch_dispatch_stack", lambda: 0, _UNSEEN)
_DENORMAL = 5e-324  # the least number above zero
_Setting = tuple[str, Callable[[], Any], Callable[[Any], Any]]  # its name, how to read it, how to set it
_OF_BACKENDS = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "mkldnn.enabled",
    "mkldnn.deterministic",
)


def _set_matmul_precision(value: str) -> None:
    for backend in (torch.backends.cuda, torch.backends.mkldnn):
        with suppress(AttributeError, RuntimeError):  # an older PyTorch has no such name
            backend.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision(value)


def _pop_function_modes(left: int) -> None:
    while _FUNCTION_MODES() > left:
        torch._C._pop_torch_function_stack()


def _pop_dispatch_modes(left: int) -> None:
    while _DISPATCH_MODES() > left:
        _python_dispatch._pop_mode()


def _of_backend(path: str) -> _Setting:
    """An attribute below torch.backends; None where this PyTorch has none of that name."""
    above, _, name = path.rpartition(".")
    owner = attrgetter(above)(torch.backends)
    return path, lambda: getattr(owner, name, None), lambda was: setattr(owner, name, was)


def _of_sdpa(name: str) -> _Setting:
    cuda = torch.backends.cuda
    return f"{name}_sdp", getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")


def _of_autocast(device: str, name: str) -> _Setting:
    return name, lambda: torch.is_autocast_enabled(device), lambda was: torch.set_autocast_enabled(device, was)


def _of_autocast_dtype(device: str) -> _Setting:
    return (
        f"autocast's dtype on {device}",
        lambda: torch.get_autocast_dtype(device),
        lambda was: torch.set_autocast_dtype(device, was),
    )


_SETTINGS: list[_Setting] = [
    ("torch.num_threads", torch.get_num_threads, torch.set_num_threads),
    ("float32_matmul_precision", torch.get_float32_matmul_precision, _set_matmul_precision),
    ("default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("default_device", torch.get_default_device, lambda was: torch.set_default_device(None if was.type == "cpu" else was)),
    ("torch function modes", _FUNCTION_MODES, _pop_function_modes),
    ("torch dispatch modes", _DISPATCH_MODES, _pop_dispatch_modes),
    ("deterministic_algorithms", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    ("grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
    *map(_of_sdpa, ("flash", "mem_efficient", "math", "cudnn")),
    *map(_of_backend, _OF_BACKENDS),
    ("denormal numbers kept", lambda: _DENORMAL * 2.0 != 0.0, lambda was: torch.set_flush_denormal(not was)),
    _of_autocast("cuda", "autocast"),
    _of_autocast("cpu", "autocast on the CPU"),
    *map(_of_autocast_dtype, ("cuda", "cpu")),
    ("anomaly detection", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    ("garbage collection", gc.isenabled, lambda was: gc.enable() if was else gc.disable()),
    ("sys.setswitchinterval", sys.getswitchinterval, sys.setswitchinterval),
    ("working directory", os.getcwd, os.chdir),
    ("sys.setprofile", sys.getprofile, sys.setprofile),
    ("sys.settrace", sys.gettrace, sys.settrace),
    (
        "process priority (nice)",
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda was: os.setpriority(os.PRIO_PROCESS, 0, was),
    ),
]
if hasattr(os, "sched_getaffinity"):  # Linux has it
    _SETTINGS += [
        ("processors it may run on", lambda: sorted(os.sched_getaffinity(0)), lambda was: os.sched_setaffinity(0, was)),
    ]


class Settings:
    """The settings before any user code was imported."""

    def __init__(self) -> None:
        self._was = [_now(read) for _, read, _ in _SETTINGS]

    def left(self) -> list[str]:
        """Set the settings back. Returns those that had changed, as text."""
        left = []
        for (name, read, put), was in zip(_SETTINGS, self._was, strict=True):
            if (now := _now(read)) != was:
                with suppress(PermissionError, RuntimeError):  # not every user may raise a priority again
                    put(was)
                left.append(f"{name} {now} (it was {was})")
        return left


def _now(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:  # PyTorch's own words when its older and its newer way to set it were mixed
        return "set in two ways that do not agree"


class RandomStates:
    """The states that functions share and draw random numbers from. The harness draws from generators of its own."""

    def __init__(self) -> None:
        self._was = self._now()

    def _now(self) -> dict[str, int]:
        states: dict[str, Any] = {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "random": random.getstate(),
            "numpy": pickle.dumps(np.random.get_state(legacy=False)),
        }
        if torch.cuda.is_initialized():
            states["torch.cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
        return {name: hash(state) for name, state in states.items()}

    def moved(self) -> list[str]:
        """The generators whose state moved since the last call, as text. They are not set back: draws would repeat."""
        was, self._was = self._was, self._now()
        return [f"it moves the random state of {name}" for name, state in self._was.items() if state != was.get(name, state)]


_MAX_FILES = 3  # that are named
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
_AT_HOME = (".triton", ".cache", ".nv")


class FilesWritten:
    """Files that this process opens for writing, as far as Python opens them; not those that libraries open. Caches of
    compilers and folders for temporary files are left out."""

    def __init__(self) -> None:
        places = [tempfile.gettempdir(), "/dev", "/proc", *(str(Path.home() / one) for one in _AT_HOME)]
        places += [os.environ[name] for name in _CACHES if os.environ.get(name)]
        self._others = tuple(os.path.join(os.path.realpath(one), "") for one in places)
        self._opened: dict[str, None] = {}
        self._reported = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and isinstance(path, str | bytes):
                self._opened[os.fsdecode(path)] = None

    def written(self) -> list[str]:
        """The files opened since the last call, as text; only the first few of a process are named."""
        opened, self._opened = self._opened, {}
        whole = {path: os.path.realpath(path) for path in opened}
        found = [path for path in opened if not whole[path].startswith(self._others) and "__pycache__" not in whole[path]]
        named = found[: _MAX_FILES - self._reported]
        self._reported += len(named)
        return [f"it opens a file for writing: {path}" for path in named]
