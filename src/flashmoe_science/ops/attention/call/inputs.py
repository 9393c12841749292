"""The tensors of one attention call, how an output lies in memory, and what a plan of a kernel is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flashmoe_science.kernel import Config, Kernel
from flashmoe_science.ops.attention.problem import AttentionProblem, Mask
from flashmoe_science.ops.attention.problem.features import NO_EXTRAS, Extras

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The tensors of one AttentionProblem, as [batch, heads, seqlen, head_dim] views of any strides with a contiguous
    last dimension. ``out``, where given, is written in place of a new tensor; ``return_lse`` asks for the log-sum-exp.
    ``extras`` are what the problem's modes bring (problem/features.py, which also says how K and V lie there)."""

    problem: AttentionProblem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float
    return_lse: bool = False
    out: torch.Tensor | None = None
    extras: Extras = NO_EXTRAS


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """``out`` is [batch, heads, seqlen_q, head_dim_v] in the input dtype; ``lse`` is [batch, heads, seqlen_q] fp32,
    natural log, -inf for a row that sees no key, or None where it was not asked for (or a peer does not give it)."""

    out: torch.Tensor
    lse: torch.Tensor | None = None


AttentionKernel = Kernel[AttentionProblem, AttentionInputs, AttentionOutput]
Shapes = tuple[tuple[int, ...], ...]  # of Q, K and V in this order; also their strides
# Writes ``out`` (and ``lse`` where it is not None): (q, k, v, out, lse, softmax_scale). It checks nothing.
BoundLaunch = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor | None", float], None]
# (tensors in the order of known_calls.Tensors, the keys of each sequence where no lengths are given, the scale or None for the
# default): the output and the log-sum-exp; None where a tensor is not aligned as those bound to.
KnownLaunch = Callable[
    ["tuple[torch.Tensor | None, ...]", int, float | None], "tuple[torch.Tensor, torch.Tensor | None] | None"
]


class Launcher(ABC):
    """A kernel with a config, for tensors of any lengths, batch and strides; all else is as in the inputs it was planned for:
    dtype, head dimensions, alignment to 16 bytes, the kind of mask (the two causal ones are one where the lengths are equal),
    whether the log-sum-exp is asked for, the sign of the scale. It holds no tensor.
    """

    serves_class = False  # whether what is bound serves all numbers of keys of a length_class

    @abstractmethod
    def bind(self, shapes: Shapes, strides: Shapes) -> BoundLaunch:
        """The launch for tensors of such shapes of Q, K and V and strides of them and of O: numbers that a later call need not
        work out again. It compiles if need be, and raises CannotServe."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float,
    ) -> None:
        bound = self.bind((q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride(), out.stride()))
        bound(q, k, v, out, lse, softmax_scale)


@dataclass(frozen=True, slots=True)
class BoundBy(Launcher):
    """A launcher whose ``bind`` is a function."""

    function: Callable[[Shapes, Shapes], BoundLaunch]

    def bind(self, shapes: Shapes, strides: Shapes) -> BoundLaunch:
        return self.function(shapes, strides)


class Sizes(NamedTuple):
    """The sizes of an AttentionProblem that a launch depends on, by the problem's names, without its checks."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    causal: bool
    causal_offset: int


def sizes_of(shapes: Shapes, mask: Mask) -> Sizes:
    """The sizes of [batch, heads, seqlen, head_dim] views of Q, K and V under a mask."""
    batch, heads, seqlen_q, _ = shapes[0]
    _, heads_kv, seqlen_k, _ = shapes[1]
    offset = seqlen_k - seqlen_q if mask == "causal" else 0
    return Sizes(batch, heads, heads_kv, seqlen_q, seqlen_k, mask != "full", offset)


def output_strides(q: torch.Tensor, width: int) -> tuple[int, int, int, int]:
    """Strides of a dense [batch, heads, seqlen_q, width] output in the memory order of ``q``: [B, S, H, D] stays so."""
    return strides_like(q.shape, q.stride(), width)


def strides_like(shape: tuple[int, ...], strides: tuple[int, ...], width: int) -> tuple[int, int, int, int]:
    """``output_strides`` of a query of that shape and strides."""
    _, heads, rows, _ = shape
    if strides[1] < strides[2]:
        return (rows * heads * width, width, heads * width, 1)
    return (heads * rows * width, rows * width, width, 1)


def in_order_of(q_strides: tuple[int, ...], out: torch.Tensor) -> torch.Tensor:
    """``out`` in the memory order of queries of such strides: itself, or copied where a peer chose another order."""
    if (out.transpose(1, 2) if q_strides[1] < q_strides[2] else out).is_contiguous():
        return out
    return out.new_empty_strided(out.shape, strides_like(out.shape, q_strides, out.shape[3])).copy_(out)


def finish(inputs: AttentionInputs, out: torch.Tensor, lse: torch.Tensor | None = None) -> AttentionOutput:
    """Copy into ``inputs.out`` where the caller gave one; the peers allocate their own outputs."""
    if inputs.out is None:
        return AttentionOutput(out, lse)
    inputs.out.copy_(out)
    return AttentionOutput(inputs.out, lse)


def allocate_output(inputs: AttentionInputs) -> AttentionOutput:
    """New tensors for the result, ``out`` in the memory order of ``q`` ([B, S, H, D] stays so).

    Returns:
        out [batch, heads, seqlen_q, head_dim_v] in the input dtype and, where asked for, lse [batch, heads, seqlen_q] fp32;
        of packed sequences [1, heads, total_q, ...], as Q is.
    """
    q, problem = inputs.q, inputs.problem
    out = inputs.out
    if out is None:
        shape = (*q.shape[:3], problem.head_dim_v)
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
    kernel.plan(inputs, config)(inputs.q, inputs.k, inputs.v, result.out, result.lse, inputs.softmax_scale)
    return result
