"""Host-side choices of moe_grouped_gluon_sm90: the problems and tensors it supports, its configs and its grid."""

from __future__ import annotations

import torch

from flashmoe_science.hardware.gpus import Gpu, why_no_hopper
from flashmoe_science.kernel import CannotServe, Config, Device
from flashmoe_science.ops.launch import Grid, cdiv
from flashmoe_science.ops.moe.call import MoEInputs, why_no_format
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.grouped import why_not_grouped
from flashmoe_science.ops.moe.rows import RowCounts

NAME = "moe_grouped_gluon_sm90"
ROWS = 64  # of one consumer: the M of a warpgroup's matrix instruction
STORE_COLUMNS = 64  # columns of one store
MIN_ROWS = 48  # an expert, on average, from which tiles of 128 rows are not mostly empty
THREADS = 384  # two consumers' and a producer's
# A thread's: at launch, then of consumers and producer, whose four warps gather or one copies.
REGISTERS, GATHERING, COPYING = 168, (224, 56), (240, 24)


def supports(problem: MoEProblem, device: Device) -> str | None:
    if reason := why_not_on_sm90(problem, device) or why_no_format(problem):
        return reason
    if problem.interleaved:
        return "gates and ups are interleaved in w1; it needs all gates first, then all ups"
    if problem.transposed:
        return "weights are transposed ([experts, in, out] in memory); it copies the depth of a row"
    if problem.bias:
        return "there are biases; it adds none"
    return why_not_grouped(problem)


def why_not_on_sm90(problem: MoEProblem, device: Device) -> str | None:
    """Why products of such tiles do not take a problem there, in words; None where they do."""
    if reason := why_no_hopper(device):
        return reason
    if problem.dtype == "fp32":
        return "serves fp16 and bf16, not fp32"
    for name, size in (("dim", problem.dim), ("hidden", problem.hidden)):
        if size % 8:
            return f"{name} is {size}; the copy engine needs a multiple of 8"
    if not problem.gated:
        return "the activation is not gated; it multiplies a gate by an up projection"
    return None


def suits(problem: MoEProblem, gpu: Gpu) -> bool:
    """Whether experts have so many rows that tiles are not mostly empty."""
    return problem.rows_per_expert() >= MIN_ROWS


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    """Tiles of 128 rows in two orders: up to 16 of an expert to a tile of its weights share that longer in L2 than up to 8."""
    return tuple(Config(block_m=2 * ROWS, block_n=256, block_k=64, num_stages=4, group=group) for group in (16, 8))


def check_tensors(inputs: MoEInputs, config: Config) -> None:
    """Raises CannotServe as ``check_memory``, and for configs of older records."""
    if config["block_m"] != 2 * ROWS:
        raise CannotServe(f"block_m is {config['block_m']}; its two consumers take {2 * ROWS} rows")
    x, w1, w2, *_ = inputs.tensors
    check_memory(hidden_states=x, w1=w1, w2=w2)


def check_memory(**tensors: torch.Tensor) -> None:
    """Raises CannotServe for memory that the copy engine does not take."""
    for name, tensor in tensors.items():
        unit = 16 // tensor.element_size()
        if tensor.data_ptr() % 16:
            raise CannotServe(f"{name} does not start at a multiple of 16 bytes; its copies need that")
        if tensor.stride(-1) != 1:
            raise CannotServe(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be 1")
        for dim, stride in enumerate(tensor.stride()[:-1]):
            if stride <= 0 or stride % unit:
                raise CannotServe(f"{name} has stride {stride} in dimension {dim}; its copies need a multiple of {unit}")


def grid(counts: RowCounts, weights: int, block_n: int, gpu: Gpu) -> Grid:
    """A program for each multiprocessor, if there can be as many tiles of an expert's ``weights`` rows."""
    return (min(counts.tiles * cdiv(weights, block_n), gpu.sm_count), 1, 1)
