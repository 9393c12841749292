"""PyTorch's grouped matrix products on tokens sorted by expert: what transformers runs by default."""

from __future__ import annotations

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.moe.call.inputs import MoEInputs, MoEKernel
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.peer import one_config


def supports(problem: MoEProblem, device: Device) -> str | None:
    return None


def grouped_mm(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """PyTorch's grouped matrix products on tokens sorted by expert, and a gather-sum of the results in one kernel, which is
    what an embedding bag is; on a GPU, nothing waits for the host (in bf16)."""
    (tokens, top_k), experts, functional = topk_ids.shape, w1.shape[0], torch.nn.functional
    by_expert, order = topk_ids.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=x.device, dtype=by_expert.dtype)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    gate, up = functional.grouped_mm(x[order // top_k], w1.transpose(1, 2), offs=ends).chunk(2, -1)
    down = functional.grouped_mm(functional.silu(gate) * up, w2.transpose(1, 2), offs=ends)
    row_of_pair = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    weights = topk_weights.to(x.dtype)
    return functional.embedding_bag(row_of_pair.view(tokens, top_k), down, mode="sum", per_sample_weights=weights)


def run(inputs: MoEInputs, config: Config) -> torch.Tensor:
    return grouped_mm(inputs.x, inputs.w1, inputs.w2, inputs.topk_weights, inputs.topk_ids)


def launches(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    # Which products run on other GPUs depends on the dtype and the PyTorch.
    fused = problem.dtype == "bf16" and gpu.compute_capability == (9, 0)
    return (Launch("GroupProblemShape"),) if fused else ()


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
