"""The tensors of one attention call, and how an output lies in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flashmoe_science.kernel import Config, Kernel
from flashmoe_science.ops.attention.problem import AttentionProblem

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The tensors of one AttentionProblem, as [batch, heads, seqlen, head_dim] views of any strides with a contiguous
    last dimension. ``out``, where given, is written in place of a new tensor; ``return_lse`` asks for the log-sum-exp."""

    problem: AttentionProblem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float
    return_lse: bool = False
    out: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """``out`` is [batch, heads, seqlen_q, head_dim_v] in the input dtype; ``lse`` is [batch, heads, seqlen_q] fp32,
    natural log, -inf for a row that sees no key, or None where it was not asked for (or a peer does not give it)."""

    out: torch.Tensor
    lse: torch.Tensor | None = None


AttentionKernel = Kernel[AttentionProblem, AttentionInputs, AttentionOutput]
# Writes ``out`` (and ``lse`` where it is not None) for tensors like those that it was planned for: (q, k, v, out, lse,
# softmax_scale). It checks nothing: it is the short path to the launch.
Launcher = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor | None", float], None]


def output_strides(q: torch.Tensor, width: int) -> tuple[int, int, int, int]:
    """Strides of a dense [batch, heads, seqlen_q, width] output in the memory order of ``q``: [B, S, H, D] stays so."""
    _, heads, rows, _ = q.shape
    if q.stride(1) < q.stride(2):
        return (rows * heads * width, width, heads * width, 1)
    return (heads * rows * width, rows * width, width, 1)


def finish(inputs: AttentionInputs, out: torch.Tensor, lse: torch.Tensor | None = None) -> AttentionOutput:
    """Copy into ``inputs.out`` where the caller gave one; the peers allocate their own outputs."""
    if inputs.out is None:
        return AttentionOutput(out, lse)
    inputs.out.copy_(out)
    return AttentionOutput(inputs.out, lse)


def allocate_output(inputs: AttentionInputs) -> AttentionOutput:
    """New tensors for the result, ``out`` in the memory order of ``q`` ([B, S, H, D] stays so).

    Returns:
        out [batch, heads, seqlen_q, head_dim_v] in the input dtype and, where asked for, lse [batch, heads, seqlen_q] fp32.
    """
    q, problem = inputs.q, inputs.problem
    out = inputs.out
    if out is None:
        shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
        out = q.new_empty_strided(shape, output_strides(q, problem.head_dim_v))
    lse = None
    if inputs.return_lse:
        import torch

        lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    return AttentionOutput(out, lse)


def run_planned(kernel: AttentionKernel, inputs: AttentionInputs, config: Config) -> AttentionOutput:
    """Plan and launch once: what ``Kernel.run`` means for a kernel that has a plan."""
    assert kernel.plan is not None
    result = allocate_output(inputs)
    launcher = kernel.plan(replace(inputs, out=result.out), config)
    launcher(inputs.q, inputs.k, inputs.v, result.out, result.lse, inputs.softmax_scale)
    return result
