"""Settings of PyTorch's and of the process that a call may not leave changed: whatever is timed beside it meets them too. And
what it may do, but a caller should know: move the states of random generators, open files for writing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _python_dispatch

_MIXED = "set in two ways that do not agree"
_DENORMAL = 5e-324  # the least number above zero
_Setting = tuple[str, Callable[[], Any], Callable[[Any], Any]]
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


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # PyTorch's own words when its older and its newer way to set it were mixed
        return _MIXED


def _set_matmul_precision(value: str) -> None:
    for backend in (torch.backends.cuda, torch.backends.mkldnn):
        with contextlib.suppress(AttributeError, RuntimeError):  # an older PyTorch has no such name
            backend.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision(value)


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _pop_function_modes(left: int) -> None:
    while torch._C._len_torch_function_stack() > left:
        torch._C._pop_torch_function_stack()


def _pop_dispatch_modes(left: int) -> None:
    while torch._C._len_torch_dispatch_stack() > left:
        _python_dispatch._pop_mode()


def _keeps_denormals() -> bool:
    """Whether this thread's processor computes with denormal numbers, and does not take them for zero."""
    return _DENORMAL * 2.0 != 0.0


def _of_backend(path: str) -> _Setting:
    """An attribute below torch.backends; None where this PyTorch has none of that name."""
    *owners, name = path.split(".")
    owner: Any = torch.backends
    for one in owners:
        owner = getattr(owner, one)

    def read() -> Any:
        try:
            return getattr(owner, name, None)
        except RuntimeError:
            return _MIXED

    def put(was: Any) -> None:
        with contextlib.suppress(RuntimeError):
            setattr(owner, name, was)

    return path, read, put


# (name, how to read it, how to set it)
_SETTINGS: tuple[_Setting, ...] = (
    ("torch.num_threads", torch.get_num_threads, torch.set_num_threads),
    ("float32_matmul_precision", _matmul_precision, _set_matmul_precision),
    ("default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("default_device", torch.get_default_device, _set_default_device),
    ("torch function modes", torch._C._len_torch_function_stack, _pop_function_modes),
    ("torch dispatch modes", torch._C._len_torch_dispatch_stack, _pop_dispatch_modes),
    ("deterministic_algorithms", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    ("grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
    ("flash_sdp", torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    ("mem_efficient_sdp", torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    ("math_sdp", torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    ("cudnn_sdp", torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    *map(_of_backend, _OF_BACKENDS),
    ("denormal numbers kept", _keeps_denormals, lambda was: torch.set_flush_denormal(not was)),
    ("autocast", lambda: torch.is_autocast_enabled("cuda"), lambda was: torch.set_autocast_enabled("cuda", was)),
    ("autocast on the CPU", lambda: torch.is_autocast_enabled("cpu"), lambda was: torch.set_autocast_enabled("cpu", was)),
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
)
if hasattr(os, "sched_getaffinity"):  # Linux has it
    _SETTINGS += (
        ("processors it may run on", lambda: sorted(os.sched_getaffinity(0)), lambda was: os.sched_setaffinity(0, was)),
    )


class Settings:
    """What the settings were, before anybody's code was imported."""

    def __init__(self) -> None:
        self._was = [read() for _, read, _ in _SETTINGS]

    def left(self) -> list[str]:
        """Set them back; returns those that were otherwise, in words."""
        left = []
        for (name, read, put), was in zip(_SETTINGS, self._was, strict=True):
            now = read()
            if now != was:
                with contextlib.suppress(PermissionError):  # a priority that was given away does not come back to everyone
                    put(was)
                left.append(f"{name} {now} (it was {was})")
        return left


class RandomStates:
    """The states that functions share and draw random numbers from. The harness draws from generators of its own."""

    def __init__(self) -> None:
        self._reads: dict[str, Callable[[], int]] = {
            "torch": lambda: hash(torch.get_rng_state().numpy().tobytes()),
            "random": lambda: hash(random.getstate()),
            "numpy": lambda: hash(pickle.dumps(np.random.get_state(legacy=False))),
        }
        self._was = {name: read() for name, read in self._reads.items()}

    def moved(self) -> list[str]:
        """Those that moved since the last look, in words. They are not set back: a draw that repeats is no draw."""
        if torch.cuda.is_initialized() and "torch.cuda" not in self._reads:
            self._reads["torch.cuda"] = lambda: hash(torch.cuda.get_rng_state().numpy().tobytes())
            self._was["torch.cuda"] = self._reads["torch.cuda"]()
        now = {name: read() for name, read in self._reads.items()}
        moved = [f"it moves the random state of {name}" for name, state in now.items() if state != self._was[name]]
        self._was = now
        return moved


_MOST_FILES = 3  # that are named
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
_AT_HOME = (".triton", ".cache", ".nv")


class FilesWritten:
    """Files that this process opens for writing, as far as Python opens them; not those that libraries open. Caches of
    compilers and folders for temporary files are left out."""

    def __init__(self) -> None:
        home = Path.home()
        places = [tempfile.gettempdir(), "/dev", "/proc", *(str(home / one) for one in _AT_HOME)]
        places += [os.environ[name] for name in _CACHES if os.environ.get(name)]
        self._others = tuple(os.path.join(os.path.realpath(one), "") for one in places)
        self._opened: dict[str, None] = {}
        self._told = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and isinstance(path, str | bytes):
                self._opened[os.fsdecode(path)] = None

    def written(self) -> list[str]:
        """Those opened since the last look, in words: a few of them by name, and none after those."""
        if not self._opened:
            return []
        found = [path for path in self._opened if not self._is_elsewhere(path)]
        self._opened.clear()
        named = found[: _MOST_FILES - self._told]
        self._told += len(named)
        return [f"it opens a file for writing: {path}" for path in named]

    def _is_elsewhere(self, path: str) -> bool:
        whole = os.path.realpath(path)
        return whole.startswith(self._others) or "__pycache__" in whole
