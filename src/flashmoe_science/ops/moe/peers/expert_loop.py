"""A loop over all experts, each on the tokens that chose it: how models write it when nothing better is at hand."""

from __future__ import annotations

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.moe.call.inputs import MoEInputs, MoEKernel
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.peer import one_config


def supports(problem: MoEProblem, device: Device) -> str | None:
    return None if device is None else "it waits for the host at every expert, so that no CUDA graph holds it"


def expert_loop(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """A loop over all experts, each on the tokens that chose it: how models write it when nothing better is at hand."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        tokens, place = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate, up = (x[tokens] @ w1[expert].T).chunk(2, -1)
        down = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        out.index_add_(0, tokens, down * topk_weights[tokens, place, None])
    return out.to(x.dtype)


def run(inputs: MoEInputs, config: Config) -> torch.Tensor:
    return expert_loop(inputs.x, inputs.w1, inputs.w2, inputs.topk_weights, inputs.topk_ids)


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
