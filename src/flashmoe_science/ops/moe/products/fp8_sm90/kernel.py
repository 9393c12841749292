"""Mixture of experts with fp8 weights for Hopper in Gluon: scales of blocks of 128 x 128 or of rows, tokens quantised inside.

Shapes: x [T, H], w1 e4m3 [E, 2I, H] and its scales [E, 2 I / 128, H / 128], w2 e4m3 [E, H, I] and [E, H / 128, I / 128], blocks
rounded up; or scales [E, 2I] and [E, H], or of all rows (formats: ``ops/formats.py``); weights and ids [T, K] -> out [T, H].
Gated activations, gates first, no biases; H and I multiples of 16. Compute capability 9.0 only.

Rows of both products are e4m3 too, with an fp32 scale to 128 columns: those of x by a kernel before the first product
(``quantize.py``), what is activated by its epilogue, whose tile has 128 columns. Scales that a call is given stand in their
places. Weights are the rows of the matrix instruction and tokens its columns, 8 to 128 of a tile. A warp has the copy engine
bring codes to a ring of stages 128 deep, and copies the scales of tokens by cp.async; each of two consumers multiplies 128 rows
of weights (``consumer.py``). Programs take whole tiles in an order by expert, and share what is left over (``stream_k.py``).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.moe import combine, rows
from flashmoe_science.ops.moe.call import Bind, MoEInputs, our_kernel, run_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.fp8_sm90 import quantize
from flashmoe_science.ops.moe.products.fp8_sm90.config import NAME, THREADS, check_inputs, configs, supports, workspace
from flashmoe_science.ops.moe.products.fp8_sm90.consumer import HALF, consume
from flashmoe_science.ops.moe.products.fp8_sm90.launch import bind_all, down, up
from flashmoe_science.ops.moe.products.fp8_sm90.memory import BLOCK, STEP, make_memory
from flashmoe_science.ops.moe.products.fp8_sm90.producer import produce
from flashmoe_science.ops.moe.products.stream_k_launch import programs
from flashmoe_science.ops.moe.route import triton as route
from flashmoe_science.ops.moe.rows import RowCounts


@gluon.jit
def _multiply_all(
    a_desc, w_desc, out_desc, of_a, scales, out_scales, input_scale, partial, flags, tables, pairs, tiles,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr, STRIDE_K: gl.constexpr, UPS: gl.constexpr, STRIDE_S: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, COLUMNS: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Both products: a producer and its consumers, for ``COLUMNS`` tiles of weights an expert."""
    memory = make_memory(a_desc, w_desc, out_desc, STAGES, FUNCTION is not None and input_scale is None)
    STEPS: gl.constexpr = (DEPTH + STEP - 1) // STEP
    gl.warp_specialize(
        [
            (consume, (
                scales, out_desc, out_scales, input_scale, partial, flags, memory, pairs, 0, DEPTH, WIDTH, STRIDE_E, STRIDE_N,
                STRIDE_K, UPS, STRIDE_S, FUNCTION, ALPHA, LIMIT,
            )),
            (consume, (
                scales, out_desc, out_scales, input_scale, partial, flags, memory, pairs, 1, DEPTH, WIDTH, STRIDE_E, STRIDE_N,
                STRIDE_K, UPS, STRIDE_S, FUNCTION, ALPHA, LIMIT,
            )),
            (produce, (a_desc, of_a, w_desc, tables, pairs, tiles, memory, EXPERTS, STEPS, COLUMNS, GROUP)),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_up_fp8_sm90(
    a_desc, w_desc, out_desc, of_a, scales, out_scales, input_scale, partial, flags, tables, pairs, tiles,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr, STRIDE_K: gl.constexpr, UPS: gl.constexpr, STRIDE_S: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The activated first product as codes and their scales: act(a[row] . w[expert, gate n], . w[expert, up n])."""
    _multiply_all(
        a_desc, w_desc, out_desc, of_a, scales, out_scales, input_scale, partial, flags, tables, pairs, tiles,
        EXPERTS, DEPTH, WIDTH, STRIDE_E, STRIDE_N, STRIDE_K, UPS, STRIDE_S, FUNCTION, ALPHA, LIMIT, (WIDTH + STEP - 1) // STEP,
        GROUP, STAGES, CONSUMER_REGS, PRODUCER_REGS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_down_fp8_sm90(
    a_desc, w_desc, out_desc, of_a, scales, out_scales, input_scale, partial, flags, tables, pairs, tiles,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr,
    STRIDE_E: gl.constexpr, STRIDE_N: gl.constexpr, STRIDE_K: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The second product: out[row, n] = a[row] . w[expert, n]. Its flags are those after the first product's."""
    flags += BLOCK // HALF * gl.num_programs(0)
    _multiply_all(
        a_desc, w_desc, out_desc, of_a, scales, out_scales, input_scale, partial, flags, tables, pairs, tiles,
        EXPERTS, DEPTH, WIDTH, STRIDE_E, STRIDE_N, STRIDE_K, 0, 0, None, 0.0, 0.0, (WIDTH + BLOCK - 1) // BLOCK,
        GROUP, STAGES, CONSUMER_REGS, PRODUCER_REGS,
    )  # fmt: skip


def plan(inputs: MoEInputs, config: Config) -> Bind:
    check_inputs(inputs)
    bind_up, bind_down = up(flashmoe_moe_up_fp8_sm90, inputs, config), down(flashmoe_moe_down_fp8_sm90, inputs, config)
    return bind_all(inputs, config, bind_up, bind_down)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    counts, grid = RowCounts.of(problem, config["block_m"]), (programs(gpu), 1, 1)
    products = (Launch(f"^{one.__name__}$", grid, THREADS) for one in (flashmoe_moe_up_fp8_sm90, flashmoe_moe_down_fp8_sm90))
    around = *route.launches_of(problem), *rows.launches(counts), quantize.launch_of(problem.tokens, problem.dim)
    return *around, *products, *combine.launches(problem)


KERNEL = our_kernel(
    name=NAME,
    about="warp-specialised Gluon for Hopper: fp8 weights and tokens, sums of 128 in tensor cores and of those in fp32",
    supports=supports,
    configs=configs,
    run=run_of(plan),
    launches=launches,
    plan=plan,
    workspace=workspace,
)
