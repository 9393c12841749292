"""What the wrappers of peers share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.problem import Problem

ONLY_CONFIG = (Config(),)  # a peer that chooses its own tiles


def one_config(problem: Problem, device: Device) -> tuple[Config, ...]:
    return ONLY_CONFIG


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
