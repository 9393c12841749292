"""PyTorch's grouped matrix products on tokens sorted by expert: what transformers runs by default."""

from __future__ import annotations

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.moe.inputs import MoEInputs, MoEKernel
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.peer import one_config


def supports(problem: MoEProblem, device: Device) -> str | None:
    return None


def grouped_mm(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """PyTorch's grouped matrix products on tokens sorted by expert; on a GPU, nothing waits for the host (in bf16)."""
    (tokens, top_k), experts = topk_ids.shape, w1.shape[0]
    by_expert, order = topk_ids.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(experts, device=x.device, dtype=by_expert.dtype), right=True).int()
    gate, up = torch.nn.functional.grouped_mm(x[order // top_k], w1.transpose(1, 2), offs=ends).chunk(2, -1)
    down = torch.nn.functional.grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offs=ends)
    unsorted = torch.empty_like(down)
    unsorted[order] = down
    return (unsorted.view(tokens, top_k, -1) * topk_weights[:, :, None]).sum(1).to(x.dtype)


def run(inputs: MoEInputs, config: Config) -> torch.Tensor:
    return grouped_mm(inputs.x, inputs.w1, inputs.w2, inputs.topk_weights, inputs.topk_ids)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    return ()  # which products run depends on the dtype and the PyTorch


KERNEL = MoEKernel(
    name="grouped_mm",
    origin="peer",
    op="moe",
    about="PyTorch's grouped matrix products on tokens sorted by expert",
    supports=supports,
    configs=one_config,
    run=run,
    launches=launches,
    on_cpu=True,
)
