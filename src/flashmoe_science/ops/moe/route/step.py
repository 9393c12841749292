"""What a step of training launches and takes around an experts' backward: the router, the forward, the router's backward."""

from __future__ import annotations

from dataclasses import fields

import torch

from flashmoe_science.dispatch.select import select
from flashmoe_science.dispatch.tuned import known_table
from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Launch
from flashmoe_science.operations import kernel_named, operation
from flashmoe_science.ops.launch import workspace_bytes
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem
from flashmoe_science.ops.moe.route import backward_triton, triton
from flashmoe_science.ops.moe.rows import RowCounts
from flashmoe_science.problem import DTYPE_BYTES

_LEAST_TILE = 16  # rows of one: of none are there more tiles


def launches_around(problem: MoEBackwardProblem, gpu: Gpu, *backward: Launch) -> tuple[Launch, ...]:
    """All launches of a problem, of which those of the backward are given: no others where it starts from ids."""
    if problem.routing == "ids":
        return backward
    sizes = {one.name: getattr(problem.from_ids(), one.name) for one in fields(problem)}
    forward, op = MoEProblem(**sizes), operation(MoEProblem.op)
    chosen = select(forward, gpu, known_table(), op.ours(), op.fallback())
    of_forward = kernel_named(chosen.kernel, op.name).launches(forward, chosen.config, gpu)
    return (*triton.launches_of(problem), *of_forward, *backward, *backward_triton.launches_of(problem))


def workspace_around(problem: MoEBackwardProblem, backward: int) -> int:
    """Bytes that a problem takes beyond its results at the most, of which the backward's are given: in a step also those of the
    forward, its result and pre-activations, what the router chose, and the gradient of its weights."""
    if problem.routing == "ids":
        return backward
    size, pairs, width = DTYPE_BYTES[problem.dtype], problem.pairs(), problem.rows_of_w1()
    rows = (RowCounts.of(problem, _LEAST_TILE).length, torch.int32), (pairs * (problem.hidden + problem.dim) * size, torch.int8)
    kept = (problem.tokens * problem.dim + pairs * width) * size + triton.routing_bytes(problem) + 4 * pairs
    return backward + workspace_bytes(rows) + kept
