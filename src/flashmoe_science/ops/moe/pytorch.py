"""A mixture of experts by PyTorch's own operators, differentiable: on the CPU, and where gradients are needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flashmoe_science.ops.calls import is_plain
from flashmoe_science.ops.moe.call import Activation, Tensors

_ALIGNED_BYTES = 16  # of the strides that PyTorch's grouped product takes


def pytorch_moe(tensors: Tensors, activation: Activation) -> torch.Tensor:
    """The experts by grouped products on rows sorted by expert; differentiable in all but the ids. Nothing waits for the host.

    Where PyTorch's grouped product refuses (fp64, a stride of no multiple of 16 bytes), every expert computes every row.

    A pair whose id is no expert's is computed by expert 0 on zeros and left out, so that nothing of it enters a sum.
    """
    x, w1, w2, weights, ids, gate_up_bias, down_bias = tensors
    ids, experts = ids.long(), w1.shape[0]
    tokens, top_k = ids.shape
    here = (ids >= 0) & (ids < experts)
    by_expert, order = torch.where(here, ids, 0).flatten().sort(stable=True)
    inside = here.flatten()[order, None]
    rows = torch.where(inside, x[order // top_k], 0.0)
    ends = torch.searchsorted(by_expert, torch.arange(experts, device=x.device), right=True).int()
    both = add_bias(_products(rows, w1, ends, by_expert), gate_up_bias, by_expert)
    down = add_bias(_products(activate(both, activation), w2, ends, by_expert), down_bias, by_expert)
    unsorted = torch.zeros_like(down).index_copy(0, order, torch.where(inside, down, 0.0))
    wide = torch.promote_types(x.dtype, torch.float32)
    applied = torch.where(here, weights.to(wide), 0.0)
    return (unsorted.view(tokens, top_k, -1).to(wide) * applied[:, :, None]).sum(1).to(x.dtype)


def _products(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, by_expert: torch.Tensor) -> torch.Tensor:
    """rows[first:end] @ weights[expert].T of each expert."""
    steps = [stride * rows.element_size() for one in (rows, weights) for stride in one.stride() if stride != 1]
    # Its shape function, which torch.compile asks, has no dtype but bf16; it takes no fp64.
    supported = rows.dtype == torch.bfloat16 or (rows.dtype != torch.float64 and is_plain(rows, weights))
    if supported and not any(step % _ALIGNED_BYTES for step in steps):
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    out = rows.new_zeros(rows.shape[0], weights.shape[1])
    for expert, weight in enumerate(weights):
        out = torch.where((by_expert == expert)[:, None], rows @ weight.T, out)
    return out


def add_bias(rows: torch.Tensor, bias: torch.Tensor | None, experts: torch.Tensor | int) -> torch.Tensor:
    """Each row and its expert's bias, if there are biases, rounded as the rows are."""
    return rows if bias is None else rows + bias[experts].to(rows.dtype)


def activate(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """``Activation`` of the first product's result, rounded as the input dtype is."""
    if not activation.gated:
        gate, up = both, None
    elif activation.interleaved:
        gate, up = both[..., 0::2], both[..., 1::2]
    else:
        gate, up = both.chunk(2, -1)
    if activation.function == "clamped_silu":
        gate = gate.clamp(max=activation.limit)
        up = None if up is None else up.clamp(-activation.limit, activation.limit) + 1
        active = gate * torch.sigmoid(activation.alpha * gate)
    elif activation.function == "relu2":
        active = F.relu(gate).square()
    elif activation.function == "gelu_tanh":
        active = F.gelu(gate, approximate="tanh")
    elif activation.function == "gelu":
        active = F.gelu(gate)
    else:
        active = F.silu(gate) if activation.function == "silu" else F.relu(gate)
    return active if up is None else active * up
