"""Host-side part of moe_gemv_gluon: the problems it supports, its configs, and its two launches."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from flashmoe_science.formats import FORMATS
from flashmoe_science.hardware.gpus import Gpu, why_no_triton
from flashmoe_science.kernel import CannotServe, Config, Device
from flashmoe_science.ops.launch import Build, Grid, Pointer, address, allocator, cdiv, next_power_of_2, stand_in
from flashmoe_science.ops.moe.call import Bind, MoEInputs, MoELaunch, Shape, activation_of, check_sums_alone, contiguous
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.formats import in_bytes, scales_in_format
from flashmoe_science.ops.moe.products.gemv_gluon.operands import TOKENS
from flashmoe_science.ops.moe.products.grouped import DTYPES, down_constexprs, starts_early, up_constexprs
from flashmoe_science.ops.moe.route.triton import routing_bytes, why_no_router

NAME = "moe_gemv_gluon"
MAX_TOKENS, MAX_PLACES = TOKENS.value, 16
_QUANTISED_BYTES = 2**27  # of weights read: between 75 MB, where it is the faster with quantised tokens, and 151 MB
_ROWS = 16  # of weights, of a program of the second product
_NAMES = ("up_rows", "up_warps", "up_steps", "down_warps", "down_side", "down_steps", "down_registers")
_REGISTERS = 128  # of a thread at most: two programs of eight warps a multiprocessor


def supports(problem: MoEProblem, device: Device) -> str | None:
    if reason := why_no_triton(device):
        return reason
    assert device is not None
    if device.compute_capability >= (10, 0):  # it has run on none, and on some it would be the only kernel of ours
        return f"serves compute capability 8.0 to 9.0, not {device.product}"
    if problem.weight_format is None:
        return f"its weights are in a format, and the problem's {problem.dtype}"
    if FORMATS[problem.weight_format].w8a8 and (reason := _why_not_w8a8(problem, device)):
        return reason
    dtypes = ("bf16",) if problem.weight_format == "mxfp4" or "block" in problem.weight_format else ("bf16", "fp16")
    if problem.dtype not in dtypes:
        return f"weights in {problem.weight_format} are multiplied as {' or '.join(dtypes)}, and the problem is {problem.dtype}"
    for name, size, most in (("tokens", problem.tokens, MAX_TOKENS), ("top_k", problem.top_k, MAX_PLACES)):
        if size > most:
            return f"{name} is {size}; it is for at most {most}"
    for name, size in (("dim", problem.dim), ("hidden", problem.hidden)):
        if size % 2:
            return f"{name} is {size}; codes are read in pairs"
    return why_no_router(problem)


def _why_not_w8a8(problem: MoEProblem, device: Gpu) -> str | None:
    """It serves no more than Hopper's own kernel, which comes before it: no more of it has been held to the oracle on a GPU."""
    if device.compute_capability != (9, 0):
        return f"{problem.weight_format} is served on compute capability 9.0, not on {device.product}"
    if problem.bias or not activation_of(problem).halves or problem.dim % 16 or problem.hidden % 16:
        return f"{problem.weight_format} is served without biases, of gates before ups, in multiples of 16"
    return None


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    """Rows of weights of a program of the first product, its warps, and steps that are read at once; warps of the second,
    experts side by side, steps, registers of a thread; the fastest on an H200 first (docs/notes/moe-formats.md)."""
    side, form = min(next_power_of_2(problem.top_k), 8), FORMATS[str(problem.weight_format)]
    once = problem.pairs() <= side
    tiles = [(16, 4, 4, 8, side, 2, 255) if form.bits == 8 else (16, 4, 6, 8, side, 4, 255)]
    if once and form.name == "mxfp4":
        tiles = [(32, 8, 2, 8, side, 6, 128), *tiles]
    elif once and form.bits == 8 and not form.w8a8 and problem.dim <= 2048:  # of deeper rows the first product spills
        tiles = [(32, 4, 2, 8, side, 3, 255), *tiles]
    return tuple(Config(**dict(zip(_NAMES, one, strict=True))) for one in tiles)


def suits(problem: MoEProblem, gpu: Gpu) -> bool:
    """To as many tokens as an H200 or an H100 took less time for than with every other kernel."""
    form = FORMATS[str(problem.weight_format)]
    most = MAX_TOKENS if form.name.startswith("int4") else 1 if form.name == "mxfp4" else 2
    fits = not form.w8a8 or problem.pairs() * problem.weight_bytes() <= _QUANTISED_BYTES
    return gpu.compute_capability == (9, 0) and problem.tokens <= most and fits


def _results(problem: MoEProblem, config: Config) -> int:
    """Columns of the first product's result of a program."""
    return config["up_rows"] // (2 if problem.gated else 1)


def grids(problem: MoEProblem, config: Config) -> tuple[Grid, Grid]:
    up = cdiv(problem.hidden, _results(problem, config)) * problem.pairs()
    return (up, 1, 1), (cdiv(problem.dim, _ROWS), 1, 1)


def _between(problem: MoEProblem) -> torch.dtype:
    """The dtype of the rows between the products: fp32 where the second quantises them."""
    return torch.float32 if FORMATS[str(problem.weight_format)].w8a8 else DTYPES[problem.dtype]


def workspace(problem: MoEProblem, config: Config) -> int:
    """Bytes of the rows between the products, and of what a router before them chose."""
    return problem.pairs() * problem.hidden * _between(problem).itemsize + routing_bytes(problem)


def plan_both(inputs: MoEInputs, config: Config, up: Any, down: Any) -> Bind:
    """The ``plan`` of both kernels."""
    check_sums_alone(inputs)
    inputs = in_bytes(inputs)
    p, (x, w1, w2, weights, ids, *biases), of_format = inputs.problem, inputs.tensors[:7], inputs.tensors[7:]
    early, of_scales, new = starts_early(x), scales_in_format(inputs), Pointer(_between(p))
    for scale in of_format[:2]:
        assert scale is not None
        if FORMATS[str(p.weight_format)].group == 32 and scale.dtype not in (torch.uint8, x.dtype):
            raise CannotServe(f"scales of groups of 32 are {scale.dtype}; it multiplies weights by those of {x.dtype}")
    places, (of_up, of_down) = next_power_of_2(p.top_k), (tuple(map(stand_in, of_format[n::2])) for n in (0, 1))

    @cache
    def builds(once: bool) -> tuple[Build, tuple[Any, ...], Build, tuple[Any, ...]]:
        """Both, with their constexprs; ``once``: of no more experts than ``down_side``."""
        first = *up_constexprs(inputs).values(), tuple(of_scales[0]), places
        first = *first, config["up_rows"], config["up_steps"], config["up_warps"], early
        pointers = stand_in(x), stand_in(w1), *of_up, stand_in(biases[0]), stand_in(ids), new
        build_up = Build(up, (*pointers, 2, *first), num_warps=config["up_warps"], maxnreg=_REGISTERS, launch_pdl=early)
        last = *down_constexprs(inputs).values(), p.top_k, tuple(of_scales[1]), places
        last = *last, _ROWS, config["down_steps"], config["down_warps"], config["down_side"], once, early
        pointers = new, stand_in(w2), *of_down, stand_in(biases[1]), stand_in(ids), stand_in(weights), Pointer(x.dtype)
        options = {"num_warps": config["down_warps"], "maxnreg": config["down_registers"], "launch_pdl": early}
        return build_up, first, Build(down, (*pointers, 2, *last), **options), last

    def bind(like: MoEInputs, shape: Shape) -> MoELaunch:
        p, x = like.problem, like.tensors.x
        allocate, (grid_up, grid_down) = allocator(x.is_cuda), grids(p, config)
        build_up, first, build_down, last = builds(p.pairs() <= config["down_side"])
        launch_up, launch_down = build_up.bound(grid_up, p.tokens, *first), build_down.bound(grid_down, p.tokens, *last)
        of_active, result = ((p.pairs(), p.hidden), (p.hidden, 1), _between(p)), contiguous(shape, x.dtype)

        def call(
            x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
            gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None,
            gate_up_scale: torch.Tensor, down_scale: torch.Tensor,
            gate_up_zero_point: torch.Tensor | None = None, down_zero_point: torch.Tensor | None = None,
            gate_up_input_scale: torch.Tensor | None = None, down_input_scale: torch.Tensor | None = None,
        ) -> torch.Tensor:  # fmt: skip
            active, out = allocate(*of_active), allocate(*result)
            rows, chosen = address(active), address(ids)
            # Not by ``argument``: a host waits for each Python call of a token's.
            zeros_up, zeros_down, static_up, static_down, bias_up, bias_down = (
                None if gate_up_zero_point is None else address(gate_up_zero_point),
                None if down_zero_point is None else address(down_zero_point),
                None if gate_up_input_scale is None else address(gate_up_input_scale),
                None if down_input_scale is None else address(down_input_scale),
                None if gate_up_bias is None else address(gate_up_bias),
                None if down_bias is None else address(down_bias),
            )
            launch_up(address(x), address(w1), address(gate_up_scale), zeros_up, static_up, bias_up, chosen, rows)
            of_down = address(down_scale), zeros_down, static_down, bias_down
            launch_down(rows, address(w2), *of_down, chosen, address(weights), address(out))
            return out

        return call

    return bind
