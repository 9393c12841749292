"""The backward of attention on ranks that each have a part of the tokens, of forwards whose graph is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.proof import ranks
from flashmoe_science.ops.attention.proof.ranks import checked as checked
from flashmoe_science.ops.distributed import Implementation, Results

SUITES = {"context-backward": ("attnbwd b1 h32 hk8 q32768 d128 bf16 causal bshd",)}


def implementations(
    problem: AttentionBackwardProblem, inputs: Mapping[str, torch.Tensor], group: dist.ProcessGroup
) -> list[Implementation]:
    return ranks.implementations(problem, inputs, group, ("q", "k", "v", "dout"), _backward)


def _backward(
    forward: ranks.Forward, context: ranks.Context, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> Callable[[], Results]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with context(), torch.enable_grad():
        out = forward(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
