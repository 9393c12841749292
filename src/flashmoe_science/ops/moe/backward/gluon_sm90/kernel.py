"""Backward of a mixture of experts for Hopper in Gluon, for many rows an expert: the portable kernel with faster products.

Shapes: x, dout [T, H], w1 [E, 2I, H], w2 [E, H, I], weights and ids [T, K], the forward's z [P, 2I] -> the gradients, each in
the dtype of what it is the gradient of; fp16 and bf16, H and I multiples of 8, gated activations, gates before ups or beside
them, weights by rows or by columns in memory. Compute capability 9.0 only.

The first product and its epilogue are in hidden.py, dW1 and dW2 in weights.py; the rows of dx are the forward's second product
by w1 with its dimensions exchanged. All are persistent, with a producer warp group and two consumers.
"""

from __future__ import annotations

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Launch
from flashmoe_science.ops.launch import cdiv
from flashmoe_science.ops.moe import combine
from flashmoe_science.ops.moe import rows as tables
from flashmoe_science.ops.moe.backward.gluon_sm90.config import NAME, check_tensors, configs, grid_of_weights, supports
from flashmoe_science.ops.moe.backward.gluon_sm90.launch import dweights, hidden, rows
from flashmoe_science.ops.moe.backward.launch import (
    Needs,
    Products,
    grouped_backward,
    launch_of_routing,
    launches_of_biases,
    needs_of,
    wanted_of,
    workspace_of,
)
from flashmoe_science.ops.moe.call.backward import BackwardBind, BackwardInputs, our_kernel, run_of
from flashmoe_science.ops.moe.problem.backward import MoEBackwardProblem
from flashmoe_science.ops.moe.products.gluon_sm90.config import THREADS, grid
from flashmoe_science.ops.moe.route.step import launches_around
from flashmoe_science.ops.moe.rows import RowCounts


def plan(inputs: BackwardInputs, config: Config) -> BackwardBind:
    check_tensors(inputs)
    wanted, t, p = wanted_of(inputs), inputs.tensors, inputs.problem
    products = Products(
        hidden(inputs, config) if any(needs_of(inputs)) else None,
        rows(inputs, config) if wanted.dx else None,
        dweights(inputs, config, t.w1, inputs.sums.dw1, t.x.stride(0)) if wanted.dw1 else None,
        dweights(inputs, config, t.w2, inputs.sums.dw2, p.dim) if wanted.dw2 else None,
    )
    return grouped_backward(inputs, config["block_m"], cdiv(p.hidden, config["hidden_n"]), products, Needs(True, True, True))


def workspace(problem: MoEBackwardProblem, config: Config) -> int:
    return workspace_of(problem, config["block_m"], cdiv(problem.hidden, config["hidden_n"]))


def launches(problem: MoEBackwardProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    """The launches of a call that asks for every gradient; in a training step, with those around it."""
    counts, block_n = RowCounts.of(problem, config["block_m"]), config["block_n"]
    of_weights = [
        grid_of_weights(problem, *sizes, block_n, gpu)
        for sizes in ((problem.dim, problem.hidden), (problem.rows_of_w1(), problem.dim))
    ]
    return launches_around(
        problem,
        gpu,
        *tables.launches(counts),
        Launch("^flashmoe_moe_dhidden_gluon_sm90$", grid(counts, problem.hidden, config["hidden_n"], gpu), THREADS),
        launch_of_routing(counts),
        *(Launch("^flashmoe_moe_dweights_gluon_sm90$", one, THREADS) for one in of_weights),
        *launches_of_biases(problem),
        Launch("^flashmoe_moe_down_gluon_sm90$", grid(counts, problem.dim, block_n, gpu), THREADS),
        *combine.launches(problem),
    )


KERNEL = our_kernel(
    name=NAME,
    about="warp-specialised Gluon for Hopper: four persistent products; deterministic",
    supports=supports,
    configs=configs,
    run=run_of(plan),
    launches=launches,
    plan=plan,
    workspace=workspace,
)
