"""A batched matrix-vector product for each (token, expert) pair, of weights copied for it: what transformers decodes with."""

from __future__ import annotations

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.moe.call import SWIGLU, Activation, MoEInputs, MoEKernel
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.pytorch import activate, add_bias
from flashmoe_science.ops.peer import one_config

MOST_PAIRS = 64


def supports(problem: MoEProblem, device: Device) -> str | None:
    if problem.pairs() > MOST_PAIRS:
        return f"tokens times top_k is {problem.pairs()}; it copies an expert for each, and is measured up to {MOST_PAIRS}"
    return None


def batched_mm(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: Activation = SWIGLU,
) -> torch.Tensor:
    """A copy of the weights of every pair's expert, and two batched products with them."""
    (tokens, top_k), ids = topk_ids.shape, topk_ids.flatten()
    rows = x.repeat_interleave(top_k, 0)
    both = add_bias(torch.bmm(w1[ids], rows[:, :, None]).squeeze(2), gate_up_bias, ids)
    down = add_bias(torch.bmm(w2[ids], activate(both, activation)[:, :, None]).squeeze(2), down_bias, ids)
    return (down.view(tokens, top_k, -1) * topk_weights[:, :, None].to(x.dtype)).sum(1)


def run(inputs: MoEInputs, config: Config) -> torch.Tensor:
    one = inputs
    biases = one.gate_up_bias, one.down_bias
    return batched_mm(one.x, one.w1, one.w2, one.topk_weights, one.topk_ids, *biases, one.activation)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    return ()  # the products are cuBLAS's, under whatever names it gives them


KERNEL = MoEKernel(
    name="batched_mm",
    origin="peer",
    op="moe",
    about="PyTorch's batched products of each pair with a copy of its expert's weights",
    supports=supports,
    configs=one_config,
    run=run,
    launches=launches,
    on_cpu=True,
)
