"""The functions that a measurement rests on, as they were before anybody's code was imported: kept, watched and put back."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from flashmoe_science.measure import bench, callpath, eager, timing
from flashmoe_science.measure.trial import cases, wire

# Where a candidate would reach to change what a clock says, or what a comparison finds. (Not all of torch: importing its
# compiler replaces some of it.)
_MODULES: tuple[ModuleType, ...] = (time, gc, bench, callpath, cases, eager, timing, wire)
_CLASSES: tuple[Any, ...] = (torch.cuda.Event, torch.cuda.Stream, torch.cuda.CUDAGraph, torch.cuda.graph, torch.Generator)
_SINGLE = (
    (torch, ("equal", "empty", "full", "set_num_threads", "get_num_threads")),
    (torch.cuda, ("synchronize", "current_stream", "is_current_stream_capturing", "Event", "Stream", "CUDAGraph", "graph")),
    (os, ("read", "write", "_exit")),
)


# PyTorch's settings that a call may not leave changed: (name, how to read it, how to set it).
_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    ("torch.num_threads", torch.get_num_threads, torch.set_num_threads),
    ("float32_matmul_precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ("default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("deterministic_algorithms", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    ("grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
    ("flash_sdp", torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    ("mem_efficient_sdp", torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    ("math_sdp", torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    ("cudnn_sdp", torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


class Natives:
    """A snapshot of what must not be replaced, and of the settings that must not be left changed."""

    def __init__(self) -> None:
        self._settings = [(name, read(), put) for name, read, put in _SETTINGS]
        self._kept: dict[tuple[Any, str], Any] = {}
        for owner in (*_MODULES, *_CLASSES):
            self._kept |= {(owner, name): value for name, value in vars(owner).items() if callable(value)}
        for owner, names in _SINGLE:
            self._kept |= {(owner, name): getattr(owner, name) for name in names}

    def restore(self) -> list[str]:
        """Put back what was replaced; returns the names of it."""
        replaced = []
        for (owner, name), value in self._kept.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
                replaced.append(f"{_dotted(owner)}.{name}")
        return replaced

    def settings_left(self) -> list[str]:
        """Set back PyTorch's settings; returns those that were otherwise, in words."""
        left = []
        for (name, read, _), (_, was, put) in zip(_SETTINGS, self._settings, strict=True):
            now = read()
            if now != was:
                put(was)
                left.append(f"{name} {now} (it was {was})")
        return left


def _dotted(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
