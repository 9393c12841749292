"""Host-side choices of both kernels: the problems and tensors that they support, configs, programs and workspace."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.gpus import why_no_hopper
from flashmoe_science.kernel import CannotServe, Config, Device
from flashmoe_science.ops.launch import Part, next_power_of_2, workspace_bytes
from flashmoe_science.ops.moe.call import MoEInputs, check_sums_alone
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.formats import in_bytes
from flashmoe_science.ops.moe.products.gluon_sm90.config import check_memory
from flashmoe_science.ops.moe.products.grouped import why_not_grouped
from flashmoe_science.ops.moe.products.stream_k_launch import MOST_PROGRAMS
from flashmoe_science.ops.moe.products.weights_sm90.operand import CHUNK, ROWS, chunks_of, span_of
from flashmoe_science.ops.moe.products.weights_sm90.permute import padded
from flashmoe_science.ops.moe.route.triton import routing_bytes
from flashmoe_science.ops.moe.rows import RowCounts

NAME, NAME_OF_OTHERS = "moe_mxfp4_gluon_sm90", "moe_weights_gluon_sm90"
OTHER_FORMS = tuple(form.name for form in FORMATS.values() if form.name != "mxfp4" and not form.w8a8)
MOST_CONSUMERS = 4
# Of tiles of so many tokens, that shared memory has room for: of four bits, and of fp8.
_STAGES, _STAGES_OF_FP8 = {8: 11, 16: 10, 32: 8, 64: 6, 128: 4}, {8: 12, 16: 11, 32: 10, 64: 8, 128: 6}
_FOR_FOUR = 64  # tokens of a tile up to which four consumers have enough registers
FLAGS = MOST_CONSUMERS * MOST_PROGRAMS  # of a product: one for each consumer of each program


class Registers(NamedTuple):
    """A kernel's threads, and of each thread the registers at launch, then of consumers and of the producer."""

    threads: int
    at_launch: int
    consumer: int
    producer: int


def registers_of(config: Config) -> Registers:
    return Registers(384, 168, 240, 24) if config["consumers"] == 2 else Registers(640, 96, 112, 32)


def supports(forms: tuple[str, ...], problem: MoEProblem, device: Device) -> str | None:
    if reason := why_no_hopper(device):
        return reason
    if problem.weight_format not in forms:
        return f"its weights are {' or '.join(forms)}, and the problem's {problem.weight_format or problem.dtype}"
    if problem.dtype != "bf16":
        return f"serves bf16, not {problem.dtype}"
    if not problem.gated:
        return "the activation is not gated; it multiplies a gate by an up projection"
    for name, size in (("dim", problem.dim), ("hidden", problem.hidden)):
        if size % 16:
            return f"{name} is {size}; its copies of fp8 need a multiple of 16"
    return why_not_grouped(problem)


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    """Tiles of as many tokens as most experts have, the best guess first, then the narrower and the wider."""
    mean = problem.rows_per_expert()
    fit = min(max(next_power_of_2(int(mean + 2 * mean**0.5)), min(_STAGES)), max(_STAGES))
    several = (tokens for tokens in (fit, fit // 2, 2 * fit) if tokens in _STAGES)
    return tuple(tile_of(tokens, form=str(problem.weight_format)) for tokens in several)


def tile_of(tokens: int, consumers: int | None = None, form: str = "mxfp4") -> Config:
    """The config whose tiles have so many tokens, for as many consumers as have the registers."""
    consumers = consumers or (MOST_CONSUMERS if tokens <= _FOR_FOUR else 2)
    tile = {"block_m": tokens, "block_n": ROWS.value, "block_k": chunks_of(form) * CHUNK.value}
    stages = (_STAGES_OF_FP8 if chunks_of(form) == 1 else _STAGES)[tokens]
    return Config(**tile, num_stages=stages, group=8, consumers=consumers)


def checked(inputs: MoEInputs) -> MoEInputs:
    """The inputs, weights as bytes. Raises CannotServe for tensors that no kernel here takes."""
    check_sums_alone(inputs)
    inputs = in_bytes(inputs)
    check_memory(w1=inputs.tensors.w1, w2=inputs.tensors.w2)
    blocks_of_experts(inputs)
    return inputs


def rows_of_a_column(inputs: MoEInputs) -> tuple[int, int]:
    """Rows of w1 from one gate to the next, and from a gate to its up."""
    return (2, 1) if inputs.activation.interleaved else (1, inputs.problem.hidden)


def blocks_of_experts(inputs: MoEInputs) -> int:
    """Blocks of a thread's columns from one expert's w1 to the next's. Raises CannotServe if it is no whole number of them."""
    w1 = inputs.tensors.w1
    block: int = span_of(str(inputs.problem.weight_format)) * rows_of_a_column(inputs)[0] * w1.stride(1)
    if w1.stride(0) % block:
        raise CannotServe(f"w1 has stride {w1.stride(0)} in dimension 0; its copies need a multiple of {block}")
    return w1.stride(0) // block


def parts(problem: MoEProblem, config: Config) -> tuple[Part, ...]:
    """What stands between the launches: the tables, permuted rows of x, those between the products and after the second, sums
    of tiles that programs share, and flags of both products."""
    counts, dtype = RowCounts.of(problem, config["block_m"]), torch.bfloat16
    of_rows = ((counts.pairs * width, dtype) for width in (padded(problem.dim), padded(problem.hidden), problem.dim))
    sums = MOST_PROGRAMS * config["block_n"] * config["block_m"]
    return (counts.length, torch.int32), *of_rows, (sums, torch.float32), (2 * FLAGS, torch.int32)


def workspace(problem: MoEProblem, config: Config) -> int:
    """Bytes of ``parts``, and of what a router before them chose."""
    return workspace_bytes(parts(problem, config)) + routing_bytes(problem)
