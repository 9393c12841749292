"""What moe_bwd_gluon_sm90 serves, and the sizes of its tiles: those of the forward's products (``products/gluon_sm90``)."""

from __future__ import annotations

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device
from flashmoe_science.ops.launch import Grid, cdiv
from flashmoe_science.ops.moe.call.backward import BackwardInputs
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.gluon_sm90.config import ROWS, check_memory, why_not_on_sm90
from flashmoe_science.ops.moe.products.gluon_sm90.config import configs as configs_of_products
from flashmoe_science.ops.moe.rows import why_no_tables

NAME = "moe_bwd_gluon_sm90"
Z_COLUMNS = 64  # of a stage of z


def supports(problem: MoEProblem, device: Device) -> str | None:
    return why_not_on_sm90(problem, device) or why_no_tables(problem)


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    """The forward's tiles. The first product's are narrower: its epilogue would spill beside an accumulator of 256 columns."""
    return tuple(Config(**one, hidden_n=128, hidden_stages=6) for one in configs_of_products(problem, device))


def check_tensors(inputs: BackwardInputs) -> None:
    """Raises CannotServe for memory that the copy engine does not take."""
    t = inputs.tensors
    check_memory(hidden_states=t.x, w1=by_rows(t.w1), w2=by_rows(t.w2), z=t.z)
    check_memory(**{name: by_rows(one) for name, one in inputs.sums._asdict().items() if one is not None})


def by_rows(weights: torch.Tensor) -> torch.Tensor:
    """A view of weights, or of their gradient, whose last dimension is the one that lies in memory."""
    return weights.mT if weights.stride(2) != 1 == weights.stride(1) else weights


def grid_of_weights(problem: MoEProblem, height: int, width: int, block_n: int, gpu: Gpu) -> Grid:
    """A program for each multiprocessor, if there are as many tiles of dW."""
    return (min(problem.experts * cdiv(height, 2 * ROWS) * cdiv(width, block_n), gpu.sm_count), 1, 1)
