"""The experts by PyTorch's operators, as transformers and models compute them: by grouped products of sorted tokens, by batched
products of each (token, expert) pair, and by a loop over the experts."""

from __future__ import annotations

from functools import partial

import torch

from flashmoe_science.hardware.gpus import Gpu
from flashmoe_science.kernel import Config, Device, Launch
from flashmoe_science.ops.moe.call import SWIGLU, Activation, Tensors, why_no_format
from flashmoe_science.ops.moe.peers import peer_kernel
from flashmoe_science.ops.moe.problem import MoEProblem
from flashmoe_science.ops.moe.pytorch import activate, add_bias, as_multiplied, dequantised
from flashmoe_science.ops.peer import launches_of

MAX_PAIRS = 64  # of batched_mm, up to which it is measured


def grouped_mm(tensors: Tensors, activation: Activation = SWIGLU) -> torch.Tensor:
    """The experts by PyTorch's grouped matrix products of tokens sorted by expert, which transformers runs by default. The
    results are gathered and summed in one kernel, an embedding bag, or as transformers does where the weights need gradients,
    which the bag has none of in 16 bits on a GPU; there nothing waits for the host (in bf16). Weights in a format are
    dequantised in each call."""
    x, w1, w2, topk_weights, topk_ids, gate_up_bias, down_bias, *_, of_x, of_active = dequantised(tensors, activation)
    (tokens, top_k), experts, functional = topk_ids.shape, w1.shape[0], torch.nn.functional
    by_expert, order = topk_ids.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=x.device, dtype=by_expert.dtype)
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    if of_x is None or of_active is None:
        rows = as_multiplied(x, activation)[order // top_k]  # a token once, for all of its experts
    else:
        of_x, of_active = of_x[by_expert], of_active[by_expert]
        rows = as_multiplied(x[order // top_k], activation, of_x)
    both = add_bias(functional.grouped_mm(rows, w1.transpose(1, 2), offs=ends), gate_up_bias, by_expert)
    down = functional.grouped_mm(as_multiplied(activate(both, activation), activation, of_active), w2.mT, offs=ends)
    down = add_bias(down, down_bias, by_expert)
    row_of_pair = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device)).view(tokens, top_k)
    weights = topk_weights.to(x.dtype)
    if weights.requires_grad:
        return (down[row_of_pair] * weights[:, :, None]).sum(1)
    return summed(down, row_of_pair, weights)


def summed(rows: torch.Tensor, row_of_pair: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, H]: rows [R, H] of each token's pairs [T, K] times their weights of the same dtype, summed in one kernel."""
    return torch.nn.functional.embedding_bag(row_of_pair, rows, mode="sum", per_sample_weights=weights)


def batched_mm(tensors: Tensors, activation: Activation = SWIGLU) -> torch.Tensor:
    """The experts by two batched products with a copy of the weights of every pair's expert: what transformers decodes with."""
    x, w1, w2, topk_weights, topk_ids, gate_up_bias, down_bias, *_ = tensors
    (tokens, top_k), ids = topk_ids.shape, topk_ids.flatten()
    rows = x.repeat_interleave(top_k, 0)
    both = add_bias(torch.bmm(w1[ids], rows[:, :, None]).squeeze(2), gate_up_bias, ids)
    down = add_bias(torch.bmm(w2[ids], activate(both, activation)[:, :, None]).squeeze(2), down_bias, ids)
    return (down.view(tokens, top_k, -1) * topk_weights[:, :, None].to(x.dtype)).sum(1)


def expert_loop(tensors: Tensors, activation: Activation = SWIGLU) -> torch.Tensor:
    """The experts by a loop over all of them, each on the tokens that chose it: how models write it without a fused kernel."""
    x, w1, w2, topk_weights, topk_ids, gate_up_bias, down_bias, *_, of_x, of_active = dequantised(tensors, activation)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        tokens, place = torch.nonzero(topk_ids == expert, as_tuple=True)
        scale_x, scale_active = (None if one is None else one[expert] for one in (of_x, of_active))
        both = add_bias(as_multiplied(x[tokens], activation, scale_x) @ w1[expert].T, gate_up_bias, expert)
        down = add_bias(as_multiplied(activate(both, activation), activation, scale_active) @ w2[expert].T, down_bias, expert)
        out.index_add_(0, tokens, down * topk_weights[tokens, place, None])
    return out.to(x.dtype)


def _serves_few_pairs(problem: MoEProblem, device: Device) -> str | None:
    if problem.pairs() > MAX_PAIRS:
        return f"tokens times top_k is {problem.pairs()}; it copies an expert for each, and is measured up to {MAX_PAIRS}"
    return why_no_format(problem)


def _serves_cpu(problem: MoEProblem, device: Device) -> str | None:
    return None if device is None else "it waits for the host at every expert, so that no CUDA graph can capture it"


def launches_grouped(problem: MoEProblem, config: Config, gpu: Gpu) -> tuple[Launch, ...]:
    # Which products run on other GPUs depends on the dtype and the PyTorch.
    fused = problem.dtype == "bf16" and gpu.compute_capability == (9, 0)
    return (Launch("GroupProblemShape"),) if fused else ()


_peer = partial(peer_kernel, on_cpu=True)
_of_cublas = launches_of()  # under whatever names cuBLAS gives them
GROUPED_MM = _peer(
    name="grouped_mm",
    about="PyTorch's grouped matrix products on tokens sorted by expert",
    supports=lambda problem, device: None,
    run=lambda inputs, config: grouped_mm(inputs.tensors, inputs.activation),
    launches=launches_grouped,
)
BATCHED_MM = _peer(
    name="batched_mm",
    about="PyTorch's batched products of each pair with a copy of its expert's weights",
    supports=_serves_few_pairs,
    run=lambda inputs, config: batched_mm(inputs.tensors, inputs.activation),
    launches=_of_cublas,
)
EXPERT_LOOP = _peer(
    name="expert_loop",
    about="a loop over all experts, each on the tokens that chose it",
    supports=_serves_cpu,
    run=lambda inputs, config: expert_loop(inputs.tensors, inputs.activation),
    launches=_of_cublas,
)
