"""Mixture of experts with weights in a format for Hopper in Gluon: a checkpoint's codes and scales as they lie, bf16 tokens.

Shapes: x [T, H], w1 [E, 2I, H], w2 [E, H, I], their scales and zero points (the formats: ``ops/formats.py``), biases [E, 2I]
and [E, H]; weights and ids [T, K] -> out [T, H]. Gated activations, gates and ups joined or interleaved; H and I multiples of
32, of 16 for fp8. Compute capability 9.0 only. A weight is its code times its scale, rounded to bf16: exact of mxfp4.

Weights are the rows of the matrix instruction and tokens its columns, 8 to 128 of a tile. A warp has the copy engine bring 64
bytes of each row, and tokens, to a ring of stages. Four consumers take 64 rows of weights each from there to registers, or two
take 128. There the bytes become the instruction's operand without moving between threads
(``operand.py``), as tokens have their K permuted: by a kernel before the first product (``permute.py``), and by its epilogue
for the second. Few tokens are multiplied by mma.sync, a warp at a time, more by wgmma. Programs take whole tiles in an order by
expert, and share what is left over (``stream_k.py``).
"""

from __future__ import annotations

from functools import partial

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.moe import combine, rows
from flashmoe_science.ops.moe.call import Bind, MoEInputs, MoEKernel, our_kernel, run_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.stream_k_launch import programs
from flashmoe_science.ops.moe.products.weights_sm90 import permute
from flashmoe_science.ops.moe.products.weights_sm90.config import (
    NAME,
    NAME_OF_OTHERS,
    OTHER_FORMS,
    checked,
    configs,
    registers_of,
    supports,
    workspace,
)
from flashmoe_science.ops.moe.products.weights_sm90.consumer import consume
from flashmoe_science.ops.moe.products.weights_sm90.launch import bind_all, down, up
from flashmoe_science.ops.moe.products.weights_sm90.memory import make_memory
from flashmoe_science.ops.moe.products.weights_sm90.operand import ROWS, STEP
from flashmoe_science.ops.moe.products.weights_sm90.producer import produce
from flashmoe_science.ops.moe.route import triton as route
from flashmoe_science.ops.moe.rows import RowCounts


@gluon.jit
def _multiply_all(
    a_desc, w_desc, out_desc, scales, zeros, bias, partial, flags, tables, pairs, tiles,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, SCALES: gl.constexpr,
    EXPERT_BLOCKS: gl.constexpr, COLUMN: gl.constexpr, UP: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Both products: a producer and its consumers."""
    FORMAT: gl.constexpr = SCALES[0]
    memory = make_memory(w_desc, a_desc, out_desc, FORMAT, STAGES, CONSUMERS)
    # Tiles of weights an expert. Of the first product one has 256 gates and ups, of 128 columns.
    COLUMNS: gl.constexpr = (WIDTH + ROWS - 1) // ROWS if UP is None else (WIDTH + STEP - 1) // STEP
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (
                    scales, zeros, bias, out_desc, partial, flags, memory, 0, DEPTH, WIDTH, SCALES, COLUMN, UP,
                    FUNCTION, ALPHA, LIMIT,
                )),
                (consume, (
                    scales, zeros, bias, out_desc, partial, flags, memory, 1, DEPTH, WIDTH, SCALES, COLUMN, UP,
                    FUNCTION, ALPHA, LIMIT,
                )),
                (produce, (
                    a_desc, w_desc, scales, tables, pairs, tiles, memory, EXPERTS, DEPTH, COLUMNS, GROUP, EXPERT_BLOCKS,
                    WIDTH, SCALES, COLUMN, UP,
                )),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (
                    scales, zeros, bias, out_desc, partial, flags, memory, 0, DEPTH, WIDTH, SCALES, COLUMN, UP,
                    FUNCTION, ALPHA, LIMIT,
                )),
                (consume, (
                    scales, zeros, bias, out_desc, partial, flags, memory, 1, DEPTH, WIDTH, SCALES, COLUMN, UP,
                    FUNCTION, ALPHA, LIMIT,
                )),
                (consume, (
                    scales, zeros, bias, out_desc, partial, flags, memory, 2, DEPTH, WIDTH, SCALES, COLUMN, UP,
                    FUNCTION, ALPHA, LIMIT,
                )),
                (consume, (
                    scales, zeros, bias, out_desc, partial, flags, memory, 3, DEPTH, WIDTH, SCALES, COLUMN, UP,
                    FUNCTION, ALPHA, LIMIT,
                )),
                (produce, (
                    a_desc, w_desc, scales, tables, pairs, tiles, memory, EXPERTS, DEPTH, COLUMNS, GROUP, EXPERT_BLOCKS,
                    WIDTH, SCALES, COLUMN, UP,
                )),
            ],
            [4, 4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_up_weights_sm90(
    a_desc, w_desc, out_desc, scales, zeros, bias, partial, flags, tables, pairs, tiles,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, SCALES: gl.constexpr,
    EXPERT_BLOCKS: gl.constexpr, COLUMN: gl.constexpr, UP: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The activated first product: out[row, place] = act(a[row] . w[expert, gate n], . w[expert, up n]), n being the column
    that the second product has at a place."""
    _multiply_all(
        a_desc, w_desc, out_desc, scales, zeros, bias, partial, flags, tables, pairs, tiles,
        EXPERTS, DEPTH, WIDTH, SCALES, EXPERT_BLOCKS, COLUMN, UP, FUNCTION, ALPHA, LIMIT,
        GROUP, STAGES, CONSUMERS, CONSUMER_REGS, PRODUCER_REGS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_down_weights_sm90(
    a_desc, w_desc, out_desc, scales, zeros, bias, partial, flags, tables, pairs, tiles,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, SCALES: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The second product: out[row, n] = a[row] . w[expert, n]. Its flags are those after the first product's."""
    flags += CONSUMERS * gl.num_programs(0)
    _multiply_all(
        a_desc, w_desc, out_desc, scales, zeros, bias, partial, flags, tables, pairs, tiles,
        EXPERTS, DEPTH, WIDTH, SCALES, None, None, None, None, 0.0, 0.0,
        GROUP, STAGES, CONSUMERS, CONSUMER_REGS, PRODUCER_REGS,
    )  # fmt: skip


def plan(inputs: MoEInputs, config: Config) -> Bind:
    inputs = checked(inputs)
    products = up(flashmoe_moe_up_weights_sm90, inputs, config), down(flashmoe_moe_down_weights_sm90, inputs, config)
    return bind_all(inputs, config, *products)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    counts, grid = RowCounts.of(problem, config["block_m"]), (programs(gpu), 1, 1)
    both = flashmoe_moe_up_weights_sm90, flashmoe_moe_down_weights_sm90
    products = (Launch(f"^{one.__name__}$", grid, registers_of(config).threads) for one in both)
    around = *route.launches_of(problem), *rows.launches(counts), permute.launch_of(counts, problem.dim)
    return *around, *products, *combine.launches(problem)


def _kernel(name: str, forms: tuple[str, ...], words: str) -> MoEKernel:
    return our_kernel(
        name=name,
        about=f"warp-specialised Gluon for Hopper: {words} become bf16 in registers, programs stream equal parts of them",
        supports=partial(supports, forms),
        configs=configs,
        run=run_of(plan),
        launches=launches,
        plan=plan,
        workspace=workspace,
    )


KERNEL = _kernel(NAME, ("mxfp4",), "mxfp4 weights")
OF_OTHERS = _kernel(NAME_OF_OTHERS, OTHER_FORMS, "weights in fp8 and int4")
