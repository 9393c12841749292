"""What a user would pick instead, wrapped as Kernels. Importing this imports no peer: each is imported when it first runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.attention.call.kernel import AttentionKernel
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.peer import one_config

peer_kernel = partial(AttentionKernel, origin="peer", op="attention", configs=one_config)


def launches_of(*names: str) -> Callable[[AttentionProblem, Config, Gpu], tuple[Launch, ...]]:
    """The promise of a peer that launches kernels of these names, whatever the problem."""
    return lambda problem, config, gpu: tuple(map(Launch, names))
