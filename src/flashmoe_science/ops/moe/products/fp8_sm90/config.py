"""Host-side choices of moe_fp8_gluon_sm90: the problems and tensors it supports, its configs, programs and workspace."""

from __future__ import annotations

import torch

from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.gpus import why_no_hopper
from flashmoe_science.kernel import CannotServe, Config, Device
from flashmoe_science.ops.formats import has_own_scales
from flashmoe_science.ops.launch import Part, cdiv, next_power_of_2, workspace_bytes
from flashmoe_science.ops.moe.call import MoEInputs, check_sums_alone
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.fp8_sm90.consumer import HALF
from flashmoe_science.ops.moe.products.fp8_sm90.memory import BLOCK, STEP
from flashmoe_science.ops.moe.products.fp8_sm90.quantize import scales_of
from flashmoe_science.ops.moe.products.gluon_sm90.config import check_memory
from flashmoe_science.ops.moe.products.grouped import why_not_grouped
from flashmoe_science.ops.moe.products.stream_k_launch import MOST_PROGRAMS
from flashmoe_science.ops.moe.route.triton import routing_bytes
from flashmoe_science.ops.moe.rows import RowCounts

NAME = "moe_fp8_gluon_sm90"
_STAGES = {8: 6, 16: 6, 32: 6, 64: 5, 128: 4}  # of tiles of so many tokens, that shared memory has room for
THREADS, AT_LAUNCH, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 384, 168, 240, 24
FLAGS = BLOCK.value // HALF.value * MOST_PROGRAMS  # of a product: one for each part of a tile of each program
_MOST_SCALES = 2**31  # their index is counted in 32 bits


def supports(problem: MoEProblem, device: Device) -> str | None:
    if reason := why_no_hopper(device):
        return reason
    if problem.weight_format is None or not FORMATS[problem.weight_format].w8a8:
        return f"its weights are multiplied by rows in e4m3, and the problem's are {problem.weight_format or problem.dtype}"
    if problem.dtype != "bf16":
        return f"serves bf16, not {problem.dtype}"
    for name, size in (("dim", problem.dim), ("hidden", problem.hidden)):
        if size % 16:
            return f"{name} is {size}; the copy engine needs a multiple of 16"
        if scales_of(problem.pairs(), size) >= _MOST_SCALES:
            return f"there are {problem.pairs()} rows of {size} columns, more than {_MOST_SCALES} scales"
    if not problem.gated:
        return "the activation is not gated; it multiplies a gate by an up projection"
    if problem.interleaved:
        return "gates and ups are interleaved in w1; it needs all gates first, then all ups"
    if problem.bias:
        return "there are biases; it adds none"
    return why_not_grouped(problem)


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    """Tiles of as many tokens as most experts have, of 128 only where they fill them: those have registers for the sums of one
    half at a time. The best guess comes first, then the narrower and the wider."""
    mean = problem.rows_per_expert()
    fit = min(max(next_power_of_2(int(mean + 2 * mean**0.5)), 8), 128 if mean >= 128 else 64)
    return tuple(tile_of(tokens) for tokens in (fit, fit // 2, 2 * fit) if tokens in _STAGES)


def tile_of(tokens: int) -> Config:
    """The config whose tiles have so many tokens."""
    return Config(block_m=tokens, block_n=BLOCK.value, block_k=STEP.value, num_stages=_STAGES[tokens], group=8)


def check_inputs(inputs: MoEInputs) -> None:
    """Raises CannotServe for tensors that it does not take."""
    check_sums_alone(inputs)
    check_memory(w1=inputs.tensors.w1, w2=inputs.tensors.w2)
    ups(inputs)


def ups(inputs: MoEInputs) -> int:
    """Elements from a gate's scale to its up's. Raises CannotServe where a block has gates and ups."""
    w1, scale, hidden = inputs.tensors.w1, inputs.tensors.gate_up_scale, inputs.problem.hidden
    assert scale is not None
    if scale.dim() == 2:  # of rows, of gates and of ups, or of all
        return scale.shape[1] // 2 * scale.stride(1)
    if not has_own_scales(w1.shape[1], scale.shape[1]):
        raise CannotServe(f"hidden is {hidden} and a block of w1's scales has gates and ups; it needs separate blocks")
    return cdiv(hidden, STEP.value) * scale.stride(1)


def parts(problem: MoEProblem, config: Config) -> tuple[Part, ...]:
    """What stands between the launches: the tables, codes and scales of both products' rows, rows after the second, sums of
    tiles that programs share, and flags of both products."""
    counts = RowCounts.of(problem, config["block_m"])
    codes = [(counts.pairs * width, torch.float8_e4m3fn) for width in (problem.dim, problem.hidden)]
    scales = [(scales_of(counts.pairs, width), torch.float32) for width in (problem.dim, problem.hidden)]
    sums = MOST_PROGRAMS * BLOCK.value * config["block_m"], torch.float32
    rows = counts.pairs * problem.dim, torch.bfloat16
    return (counts.length, torch.int32), *codes, *scales, rows, sums, (2 * FLAGS, torch.int32)


def workspace(problem: MoEProblem, config: Config) -> int:
    """Bytes of ``parts``, and of what a router before them chose."""
    return workspace_bytes(parts(problem, config)) + routing_bytes(problem)
