"""Mixture of experts for Hopper in Gluon, for many rows an expert: ``grouped_triton.py`` with faster grouped products.

Shapes: x [T, H], w1 [E, 2I, H], w2 [E, H, I]; weights and ids [T, K] -> out [T, H]; fp16 and bf16, H and I multiples of 8,
gated activations without biases. Compute capability 9.0 only. The products are those of ``products_gluon_sm90.py``; rows, tiles
and the combination are the portable kernel's.
"""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.hardware.gpus import Gpu, why_no_hopper
from flashmoe_science.hardware.probe import current_gpu
from flashmoe_science.kernel import CannotServe, CompileJob, Config, Device, Launch
from flashmoe_science.ops.descriptors import ragged, template, type_of
from flashmoe_science.ops.launch import Build, Encoder, Grid, Pointer, cdiv
from flashmoe_science.ops.moe.call.inputs import SWIGLU, Activation, MoEInputs, MoEKernel
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products import triton as grouped_triton
from flashmoe_science.ops.moe.products.gluon_products import (
    flashmoe_moe_down_gluon_sm90,
    flashmoe_moe_up_gluon_sm90,
)
from flashmoe_science.ops.moe.route.triton import why_no_router
from flashmoe_science.ops.moe.rows_triton import Sizes, why_no_tables
from flashmoe_science.ops.plan import Cache

NAME = "moe_grouped_gluon_sm90"
ROWS = 64  # of one consumer: the M of a warpgroup's matrix instruction
STORED = 64  # columns of one store
MANY_ROWS = 48  # an expert, on average, from which tiles of 128 rows are not mostly empty
THREADS = 384  # two consumers' and a producer's
# A thread's: at launch, then of consumers and producer, whose four warps gather or one copies.
REGISTERS, GATHERING, COPYING = 168, (224, 56), (240, 24)


def supports(problem: MoEProblem, device: Device) -> str | None:
    if reason := why_no_hopper(device):
        return reason
    if problem.dtype == "fp32":
        return "serves fp16 and bf16, not fp32"
    for name, size in (("dim", problem.dim), ("hidden", problem.hidden)):
        if size % 8:
            return f"{name} is {size}; the copy engine needs a multiple of 8"
    return why_no_tables(problem) or why_no_router(problem)


def suits(problem: MoEProblem, gpu: Gpu) -> bool:
    """With fewer rows an expert its tiles are mostly empty."""
    return problem.height() >= MANY_ROWS


def configs(problem: MoEProblem, device: Device) -> tuple[Config, ...]:
    """Tiles of 128 rows in two orders: up to 16 of an expert to a tile of its weights share that longer in L2 than up to 8."""
    return tuple(Config(block_m=2 * ROWS, block_n=256, block_k=64, num_stages=4, group=group) for group in (16, 8))


def _of_tiles(config: Config, registers: tuple[int, int]) -> dict[str, int]:
    """What both products are made for."""
    return {
        "BLOCK_M": config["block_m"], "BLOCK_N": config["block_n"], "GROUP": config["group"], "STAGES": config["num_stages"],
        "CONSUMER_REGS": registers[0], "PRODUCER_REGS": registers[1],
    }  # fmt: skip


def _constexprs_up(problem: MoEProblem, config: Config, stride_x: int, activation: Activation) -> dict[str, Any]:
    return {
        "EXPERTS": problem.experts, "TOP_K": problem.top_k, "DEPTH": problem.dim, "WIDTH": problem.hidden, "STRIDE_X": stride_x,
        "FUNCTION": activation.function, "ALPHA": activation.alpha, "LIMIT": activation.limit,
        **_of_tiles(config, GATHERING),
    }  # fmt: skip


def _constexprs_down(problem: MoEProblem, config: Config) -> dict[str, Any]:
    return {
        "EXPERTS": problem.experts, "DEPTH": problem.hidden, "WIDTH": problem.dim,
        **_of_tiles(config, COPYING),
    }  # fmt: skip


def _grids(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Grid, Grid]:
    """Of the first product and the second: a program for each multiprocessor, if there can be as many tiles."""
    tiles, width = Sizes(problem.pairs(), problem.experts, config["block_m"]).tiles, config["block_n"]
    up, down = tiles * cdiv(2 * problem.hidden, width), tiles * cdiv(problem.dim, width)
    return (min(up, gpu.sm_count), 1, 1), (min(down, gpu.sm_count), 1, 1)


_Blocks = dict[str, tuple[int, ...]]  # of tensor maps, by the kernel's argument


def _blocks_up(config: Config) -> _Blocks:
    return {"w_desc": (1, config["block_n"] // 16, 2, 8, config["block_k"]), "out_desc": (1, 1, ROWS, STORED)}


def _blocks_down(config: Config) -> _Blocks:
    deep = config["block_k"]
    return {"a_desc": (ROWS, deep), "w_desc": (1, config["block_n"], deep), "out_desc": (1, 1, ROWS, STORED)}


def _check(inputs: MoEInputs, config: Config) -> None:
    """Raises CannotServe for what this kernel leaves to the portable one, and for configs of older records."""
    if config["block_m"] != 2 * ROWS:
        raise CannotServe(f"block_m is {config['block_m']}; its two consumers take {2 * ROWS} rows")
    if not inputs.activation.gated:
        raise CannotServe("the activation is not gated; this kernel multiplies a gate by an up projection")
    if inputs.activation.interleaved:
        raise CannotServe("gates and ups are interleaved in w1; this kernel needs all gates first, then all ups")
    if inputs.gate_up_bias is not None or inputs.down_bias is not None:
        raise CannotServe("there are biases; this kernel adds none")
    for name, tensor in (("hidden_states", inputs.x), ("w1", inputs.w1), ("w2", inputs.w2)):
        if tensor.data_ptr() % 16:
            raise CannotServe(f"{name} does not start at a multiple of 16 bytes; its copies need that")
        if tensor.stride(-1) != 1:
            raise CannotServe(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be 1")
        for dim, stride in enumerate(tensor.stride()[:-1]):
            if stride <= 0 or stride % 8:
                raise CannotServe(f"{name} has stride {stride} in dimension {dim}; its copies need a multiple of 8")


class _Launcher(grouped_triton.GroupedLauncher):
    """Computes inputs like those that it was planned for, of any number of tokens."""

    def __init__(self, inputs: MoEInputs, config: Config) -> None:
        _check(inputs, config)
        super().__init__(inputs, config)
        gpu = current_gpu(inputs.x.device)
        assert gpu is not None
        p, tables = inputs.problem, Pointer(torch.int32)
        self._gpu, self._of_rows = gpu, Cache[int, Encoder](64)
        self._up = tuple(_constexprs_up(p, config, inputs.x.stride(0), inputs.activation).values())
        self._down = tuple(_constexprs_down(p, config).values())
        up = [template(block, p.dtype) for block in _blocks_up(config).values()]
        self._templates = down = [template(block, p.dtype) for block in _blocks_down(config).values()]
        options = {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": self._early}
        x = Pointer(inputs.x.dtype)  # its address is a multiple of 16, as was checked
        self._build_up = Build(flashmoe_moe_up_gluon_sm90, (x, *up, tables, 2, 2, *self._up), **options)
        self._build_down = Build(flashmoe_moe_down_gluon_sm90, (*down, tables, 2, 2, *self._down), **options)

        of_expert, of_row, _ = inputs.w1.stride()
        gates_and_ups = (p.experts, p.hidden // 8, 2, 8, p.dim), (of_expert, 8 * of_row, p.hidden * of_row, of_row, 1)
        self._encode_w1 = self._build_up.encoder(0, up[0], *gates_and_ups)
        self._encode_active = self._build_up.encoder(1, up[1], *ragged((0, p.hidden), (p.hidden, 1)))
        self._encode_w2 = self._build_down.encoder(1, down[1], (p.experts, p.dim, p.hidden), inputs.w2.stride())
        self._encode_down = self._build_down.encoder(2, down[2], *ragged((0, p.dim), (p.dim, 1)))

    def _products(self, problem: MoEProblem, sizes: Sizes) -> grouped_triton.Products:
        up_grid, down_grid = _grids(problem, self._config, self._gpu)
        launch_up, tail_up = self._build_up.launch, (sizes.pairs, sizes.tiles, *self._up)
        launch_down, tail_down = self._build_down.launch, (sizes.pairs, sizes.tiles, *self._down)
        encode_w1, encode_active, encode_read = self._encode_w1, self._encode_active, self._rows_of(sizes.pairs)
        encode_w2, encode_down = self._encode_w2, self._encode_down

        def multiply(
            x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, gate_up_bias: torch.Tensor | None,
            down_bias: torch.Tensor | None, tables: Any, active: Any, down: Any,
        ) -> None:  # fmt: skip
            launch_up(up_grid, x.data_ptr(), *encode_w1(w1), *encode_active(active), tables, *tail_up)
            launch_down(down_grid, *encode_read(active), *encode_w2(w2), *encode_down(down), tables, *tail_down)

        return multiply

    def _rows_of(self, pairs: int) -> Encoder:
        """Of so many activated rows. A map of more would let the copy engine read past the end of their memory."""
        made = self._of_rows.get(pairs)
        if made is None:
            hidden = self._down[1]
            made = self._build_down.encoder(0, self._templates[0], (pairs, hidden), (hidden, 1))
            self._of_rows[pairs] = made
        return made


def plan(inputs: MoEInputs, config: Config) -> _Launcher:
    return _Launcher(inputs, config)


def run(inputs: MoEInputs, config: Config) -> torch.Tensor:
    return plan(inputs, config)(inputs)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    (up, down), threads = _grids(problem, config, gpu), THREADS
    products = (
        Launch(f"^{flashmoe_moe_up_gluon_sm90.__name__}$", up, threads),
        Launch(f"^{flashmoe_moe_down_gluon_sm90.__name__}$", down, threads),
    )
    return grouped_triton.with_launches_around(problem, config, products)


def compile_job(problem: MoEProblem, config: Config, gpu: Gpu) -> CompileJob:
    """Of the first product."""
    constexprs = _constexprs_up(problem, config, problem.dim, SWIGLU)
    return _job(flashmoe_moe_up_gluon_sm90, problem, config, _blocks_up(config), constexprs)


def compile_job_down(problem: MoEProblem, config: Config, gpu: Gpu) -> CompileJob:
    return _job(flashmoe_moe_down_gluon_sm90, problem, config, _blocks_down(config), _constexprs_down(problem, config))


def _job(function: Any, problem: MoEProblem, config: Config, blocks: _Blocks, constexprs: dict[str, Any]) -> CompileJob:
    described = {name: type_of(block, problem.dtype) for name, block in blocks.items()}
    pointers = {"x": f"*{problem.dtype}", "tables": "*i32"}
    signature = dict.fromkeys(function.arg_names, "i32") | described | dict.fromkeys(constexprs, "constexpr")
    signature |= {name: kind for name, kind in pointers.items() if name in signature}
    return CompileJob(
        function=function,
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=tuple(name for name in pointers if name in signature),
        num_warps=4,
        num_stages=1,
        threads=THREADS,
        maxnreg=REGISTERS,
        gluon=True,
    )


KERNEL = MoEKernel(
    name=NAME,
    origin="ours",
    op="moe",
    about="warp-specialised Gluon for Hopper, for many rows an expert: producers gather or copy, 2 consumer warpgroups",
    supports=supports,
    configs=configs,
    run=run,
    launches=launches,
    plan=plan,
    workspace=grouped_triton.workspace,
    compile_job=compile_job,
    suits=suits,
)
