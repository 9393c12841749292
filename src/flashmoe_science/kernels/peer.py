"""What the peers' wrappers share."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from flashmoe_science.kernels.kernel import AttentionInputs, AttentionOutput, Config, Device
from flashmoe_science.problem import Problem

if TYPE_CHECKING:
    import torch

ONLY_CONFIG = (Config(),)  # a peer that chooses its own tiles


def one_config(problem: Problem, device: Device) -> tuple[Config, ...]:
    return ONLY_CONFIG


def finish(inputs: AttentionInputs, out: torch.Tensor, lse: torch.Tensor | None = None) -> AttentionOutput:
    """Copy into ``inputs.out`` where the caller gave one; the peers allocate their own outputs."""
    if inputs.out is None:
        return AttentionOutput(out, lse)
    inputs.out.copy_(out)
    return AttentionOutput(inputs.out, lse)


def not_installed(distribution: str, module: str) -> str | None:
    """None if ``module`` can be found; else the sentence for a user. Imports the parents of a dotted name, not itself."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return None if found else f"{distribution} is not installed"
