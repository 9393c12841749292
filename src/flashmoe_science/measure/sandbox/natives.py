"""Functions that a measurement rests on, kept before a user's code is imported: replaced ones are named and put back."""

from __future__ import annotations

import builtins
import gc
import os
import random
import time
from types import FunctionType, ModuleType
from typing import Any

import torch

from flashmoe_science import contract
from flashmoe_science.measure import bench, child, clocks, guards, inputs
from flashmoe_science.measure.launches import trace
from flashmoe_science.measure.worker import callers, calls, repeats
from flashmoe_science.measure.worker import clocks as worker_clocks

# What a function could replace to change a clock, a comparison, or the check of its outputs. (Not
# all of torch: importing its compiler replaces some of it.)
_OURS: tuple[ModuleType, ...] = (
    *(bench, callers, calls, child, clocks, contract),
    *(guards, inputs, repeats, trace, worker_clocks),
)
_CLASSES: tuple[Any, ...] = (
    *(torch.cuda.Event, torch.cuda.Stream, torch.cuda.CUDAGraph, torch.cuda.graph),
    *(torch.Generator, random.Random),
)
_SINGLE: tuple[tuple[Any, str], ...] = (
    (builtins, "all any float int isinstance len list map max min sum tuple type zip"),
    (torch, "equal empty full full_like set_num_threads get_num_threads _foreach_copy_ _foreach_mul_"),
    (torch.cuda, "synchronize current_stream is_current_stream_capturing Event Stream CUDAGraph graph"),
    (torch.Tensor, "clone contiguous copy_ cpu data_ptr detach fill_ mul_ numpy reshape untyped_storage view"),
    (os, "read write _exit"),
)
# Operators that values are read and changed with.
_OPERATORS = (
    *("_to_copy", "alias", "as_strided", "clone", "copy_", "detach", "equal", "reshape", "view"),
    *("_foreach_copy_", "_foreach_mul_", "empty", "fill_", "mul_", "normal_"),
)
_ABSENT = object()  # stands for a name that a class inherits


class Natives:
    """A snapshot of the functions that must not be replaced."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, str], Any] = {}
        classes = [
            one
            for module in _OURS
            for one in vars(module).values()
            if isinstance(one, type) and one.__module__ == module.__name__
        ]
        for owner in (time, gc, *_OURS, *_CLASSES, *classes):
            self._kept |= {(owner, name): value for name, value in vars(owner).items() if callable(value)}
        for owner, names in _SINGLE:
            self._kept |= {(owner, name): vars(owner).get(name, _ABSENT) for name in names.split()}
        # The Python functions behind them: those of classmethod and staticmethod too.
        functions = [getattr(one, "__wrapped__", one) if isinstance(one, classmethod | staticmethod) else one
                     for one in self._kept.values()]  # fmt: skip
        self._code = {one: one.__code__ for one in functions if isinstance(one, FunctionType)}
        self._overriding, self._operators = _overriding(), _overridden()

    def restore(self) -> list[str]:
        """Put back what was replaced; returns the names of it."""
        replaced = []
        for (owner, name), value in self._kept.items():
            if vars(owner).get(name, _ABSENT) is not value:
                delattr(owner, name) if value is _ABSENT else setattr(owner, name, value)
                dotted = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
                replaced.append(f"{dotted}.{name}")
        for function, code in self._code.items():
            if function.__code__ is not code:
                function.__code__ = code
                replaced.append(f"the code of {function.__module__}.{function.__qualname__}")
        if (now := _overriding()) != self._overriding:  # seldom: going through them takes 2 ms, after each message
            operators = _overridden() - self._operators
            self._overriding, self._operators = now, self._operators | operators
            replaced += sorted(operators)  # which cannot be put back; the report ends this process
        return replaced


def _overriding() -> int:
    """The number of operators overridden from Python, by PyTorch itself too."""
    return len(getattr(torch.library, "_impls", ()))


def _overridden() -> set[str]:
    """The operators that read or change values and are overridden from Python."""
    parted = [one.split("/") for one in getattr(torch.library, "_impls", ())]
    return {
        f"the operator {where}::{name}"
        for where, name, key in (one for one in parted if len(one) == 3)
        if where == "aten" and name.split(".")[0] in _OPERATORS and key != "Meta"
    }
