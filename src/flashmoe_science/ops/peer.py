"""What the wrappers of peers share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.problem import Problem

_PROBLEMS_COMPILED = 256  # beyond this many shapes torch.compile refuses, and never falls back, as fullgraph=True
ONLY_CONFIG = (Config(),)  # a peer that chooses its own tiles


def one_config(problem: Problem, device: Device) -> tuple[Config, ...]:
    return ONLY_CONFIG


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function by torch.compile, anew for the sizes of each problem, which takes seconds: its fastest form."""
    import torch
    from torch.compiler import config

    config.recompile_limit = max(config.recompile_limit, _PROBLEMS_COMPILED)
    return torch.compile(function, dynamic=False, fullgraph=True)


def launches_of(*names: str) -> Callable[[Problem, Config, Gpu], tuple[Launch, ...]]:
    """The promise of a peer that launches kernels of these names, whatever the problem."""
    return lambda problem, config, gpu: tuple(map(Launch, names))


def not_installed(distribution: str, module: str) -> str | None:
    """None if ``module`` can be found; else the sentence for a user. Imports the parents of a dotted name, not itself."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"{distribution} is not installed"
