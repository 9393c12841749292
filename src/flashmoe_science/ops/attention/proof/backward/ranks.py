"""The backward of attention on ranks that each have a part of the tokens: the forwards that have one, whose graph is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.proof.ranks import Forward, as_way, forwards
from flashmoe_science.ops.attention.proof.ranks import sample as sample
from flashmoe_science.ops.on_ranks import Results, Way

SUITES = {"context-backward": ("attnbwd b1 h32 hk8 q32768 d128 bf16 causal bshd",)}


def ways(problem: AttentionBackwardProblem, inputs: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> list[Way]:
    def bind(one: Forward, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Callable[[], Results]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with one.within(), torch.enable_grad():
            out = one.fn(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    names = ("q", "k", "v", "dout")
    return [as_way(one, bind, names, inputs, group) for one in forwards(problem, inputs, group) if one.trains]
