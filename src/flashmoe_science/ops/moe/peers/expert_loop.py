"""A loop over all experts, each on the tokens that chose it: how models write it without a fused kernel."""

from __future__ import annotations

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.moe.call import SWIGLU, Activation, MoEInputs, MoEKernel
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.pytorch import activate, add_bias
from flashmoe_science.ops.peer import one_config


def supports(problem: MoEProblem, device: Device) -> str | None:
    return None if device is None else "it waits for the host at every expert, so that no CUDA graph holds it"


def expert_loop(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: Activation = SWIGLU,
) -> torch.Tensor:
    """A loop over all experts, each on the tokens that chose it: how models write it without a fused kernel."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        tokens, place = torch.nonzero(topk_ids == expert, as_tuple=True)
        both = add_bias(x[tokens] @ w1[expert].T, gate_up_bias, expert)
        down = add_bias(activate(both, activation) @ w2[expert].T, down_bias, expert)
        out.index_add_(0, tokens, down * topk_weights[tokens, place, None])
    return out.to(x.dtype)


def run(inputs: MoEInputs, config: Config) -> torch.Tensor:
    one = inputs
    biases = one.gate_up_bias, one.down_bias
    return expert_loop(one.x, one.w1, one.w2, one.topk_weights, one.topk_ids, *biases, one.activation)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    return ()  # the products of each expert, under whatever names cuBLAS gives them


KERNEL = MoEKernel(
    name="expert_loop",
    origin="peer",
    op="moe",
    about="a loop over all experts, each on the tokens that chose it",
    supports=supports,
    configs=one_config,
    run=run,
    launches=launches,
    on_cpu=True,
)
