"""PyTorch's grouped matrix products on tokens sorted by expert: what transformers runs by default."""

from __future__ import annotations

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.moe.call import SWIGLU, Activation, MoEInputs, MoEKernel
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.pytorch import activate, add_bias
from flashmoe_science.ops.peer import one_config


def supports(problem: MoEProblem, device: Device) -> str | None:
    return None


def grouped_mm(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: Activation = SWIGLU,
) -> torch.Tensor:
    """PyTorch's grouped matrix products on tokens sorted by expert, and a gather-sum of the results in one kernel, which is
    what an embedding bag is; on a GPU, nothing waits for the host (in bf16)."""
    (tokens, top_k), experts, functional = topk_ids.shape, w1.shape[0], torch.nn.functional
    by_expert, order = topk_ids.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=x.device, dtype=by_expert.dtype)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    both = add_bias(functional.grouped_mm(x[order // top_k], w1.transpose(1, 2), offs=ends), gate_up_bias, by_expert)
    down = functional.grouped_mm(activate(both, activation), w2.transpose(1, 2), offs=ends)
    down = add_bias(down, down_bias, by_expert)
    row_of_pair = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    weights = topk_weights.to(x.dtype)
    return functional.embedding_bag(row_of_pair.view(tokens, top_k), down, mode="sum", per_sample_weights=weights)


def run(inputs: MoEInputs, config: Config) -> torch.Tensor:
    one = inputs
    biases = one.gate_up_bias, one.down_bias
    return grouped_mm(one.x, one.w1, one.w2, one.topk_weights, one.topk_ids, *biases, one.activation)


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
