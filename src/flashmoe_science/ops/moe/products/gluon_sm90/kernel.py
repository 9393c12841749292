"""Mixture of experts for Hopper in Gluon, for many rows an expert: the portable kernel (``triton.py``) with faster products.

Shapes: x [T, H], w1 [E, 2I, H], w2 [E, H, I]; weights and ids [T, K] -> out [T, H]; fp16 and bf16, H and I multiples of 8,
gated activations without biases. Compute capability 9.0 only.

Programs are persistent: each takes tiles of 128 rows by 256 rows of weights, the next by a counter that all share, as tiles
with few rows take less time. Tiles are in an order by expert (``rows.tile_at``): programs at work at the same time read few
experts' weights, and share them in L2.

A producer (``producer.py``) publishes a tile to its consumers through shared memory and fills a ring of stages 64 deep. Two
consumer warpgroups (``consumer.py``) of 64 rows multiply.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.moe.call import Bind, MoEInputs, our_kernel, run_of
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.products.gluon_sm90.config import NAME, THREADS, check_tensors, configs, grid, suits, supports
from flashmoe_science.ops.moe.products.gluon_sm90.consumer import consume
from flashmoe_science.ops.moe.products.gluon_sm90.launch import down, up
from flashmoe_science.ops.moe.products.gluon_sm90.memory import make_memory
from flashmoe_science.ops.moe.products.gluon_sm90.producer import Low, deepened, produce
from flashmoe_science.ops.moe.products.grouped import grouped, launches_around, workspace
from flashmoe_science.ops.moe.rows import RowCounts


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_up_gluon_sm90(
    x, w_desc, out_desc, gates_desc, ups_desc, low_desc, beside_desc, tables, pairs, tiles,
    EXPERTS: gl.constexpr, TOP_K: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, STRIDE_X: gl.constexpr,
    FUNCTION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, RANK: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The activated first product: out[row, n] = act(x[token of row] . w[expert, gate n], . w[expert, up n]); with gates_desc
    and ups_desc what is activated is written too. With a ``RANK`` low[row] . beside[expert, as w] is added before."""
    gdc_launch_dependents()
    ROWS: gl.constexpr = out_desc.block_type.shape[2]
    # A stage is full when 128 threads' copies are complete, and the weights.
    memory = make_memory(w_desc, out_desc, ROWS, w_desc.block_type.shape[4], BLOCK_M // ROWS, STAGES, 129)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tokens = gl.allocate_shared_memory(gl.int32, [BLOCK_M // ROWS, ROWS], plain)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    COLUMNS: gl.constexpr = (WIDTH + BLOCK_N // 2 - 1) // (BLOCK_N // 2)
    DEEP: gl.constexpr = deepened(DEPTH, RANK, w_desc.block_type.shape[4])
    low = Low(low_desc, beside_desc)
    gl.warp_specialize(
        [
            (consume, (out_desc, gates_desc, ups_desc, memory, 0, DEEP, FUNCTION, ALPHA, LIMIT)),
            (produce, (
                x, w_desc, low, tables, (pairs, tiles), memory, tokens, EXPERTS, TOP_K, DEPTH, RANK, STRIDE_X, COLUMNS, GROUP,
                4,
            )),
            (consume, (out_desc, gates_desc, ups_desc, memory, 1, DEEP, FUNCTION, ALPHA, LIMIT)),
        ],
        [4, 4],
        [PRODUCER_REGS, CONSUMER_REGS],
    )


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def flashmoe_moe_down_gluon_sm90(
    a_desc, w_desc, out_desc, low_desc, beside_desc, tables, pairs, tiles,
    EXPERTS: gl.constexpr, DEPTH: gl.constexpr, WIDTH: gl.constexpr, TRANSPOSED: gl.constexpr, RANK: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The second product: out[row, n] = a[row] . w[expert, n], or ``TRANSPOSED`` a[row] . w[expert, :, n]; with a
    ``RANK`` low[row] . beside[expert, as w] is added."""
    gdc_launch_dependents()
    ROWS: gl.constexpr = a_desc.block_type.shape[0]
    memory = make_memory(w_desc, out_desc, ROWS, a_desc.block_type.shape[1], BLOCK_M // ROWS, STAGES, 1)
    gdc_wait()  # what the kernel before this one wrote is visible from here on
    COLUMNS: gl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    DEEP: gl.constexpr = deepened(DEPTH, RANK, a_desc.block_type.shape[1])
    low = Low(low_desc, beside_desc)
    gl.warp_specialize(
        [
            (consume, (out_desc, None, None, memory, 0, DEEP, None, 0.0, 0.0, TRANSPOSED)),
            (produce, (
                a_desc, w_desc, low, tables, (pairs, tiles), memory, None, EXPERTS, 1, DEPTH, RANK, 0, COLUMNS, GROUP, 1,
                TRANSPOSED,
            )),
            (consume, (out_desc, None, None, memory, 1, DEEP, None, 0.0, 0.0, TRANSPOSED)),
        ],
        [1, 4],
        [PRODUCER_REGS, CONSUMER_REGS],
    )


def plan(inputs: MoEInputs, config: Config) -> Bind:
    check_tensors(inputs, config)
    bind_up = up(flashmoe_moe_up_gluon_sm90, inputs, config)
    bind_down = down(flashmoe_moe_down_gluon_sm90, inputs, config)
    return grouped(inputs, config, bind_up, bind_down)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    counts = RowCounts.of(problem, config["block_m"])
    up = Launch(f"^{flashmoe_moe_up_gluon_sm90.__name__}$", grid(counts, 2 * problem.hidden, config["block_n"], gpu), THREADS)
    down = Launch(f"^{flashmoe_moe_down_gluon_sm90.__name__}$", grid(counts, problem.dim, config["block_n"], gpu), THREADS)
    return launches_around(problem, config, up, down)


KERNEL = our_kernel(
    name=NAME,
    about="warp-specialised Gluon for Hopper, for many rows an expert: producers gather or copy, 2 consumer warpgroups",
    supports=supports,
    configs=configs,
    run=run_of(plan),
    launches=launches,
    plan=plan,
    workspace=workspace,
    suits=suits,
)
