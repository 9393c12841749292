"""What an attention kernel takes and gives: AttentionInputs, AttentionOutput, and the Launcher that a plan returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from flashmoe_science.kernel import Config, Kernel
from flashmoe_science.ops.attention.problem import AttentionProblem, Mask

if TYPE_CHECKING:  # whoever lists the peers' kernels needs no torch
    import torch

    from flashmoe_science.ops.attention.call.outputs import Result
    from flashmoe_science.ops.attention.call.tensors import Options, Tensors


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """One call of an AttentionProblem. ``out``, if given, is written in place of a new tensor."""

    problem: AttentionProblem
    tensors: Tensors
    options: Options
    softmax_scale: float
    out: torch.Tensor | None = None

    @property
    def q(self) -> torch.Tensor:
        return self.tensors.q

    @property
    def k(self) -> torch.Tensor:
        return self.tensors.k

    @property
    def v(self) -> torch.Tensor:
        return self.tensors.v

    @property
    def return_lse(self) -> bool:
        return self.options.return_lse


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """``out`` is [batch, heads, seqlen_q, head_dim_v] in the input dtype; ``lse`` is [batch, heads, seqlen_q] fp32, natural
    log, -inf for a row that sees no key, or None where it was not asked for (or a peer does not give it)."""

    out: torch.Tensor
    lse: torch.Tensor | None = None


AttentionKernel = Kernel[AttentionProblem, AttentionInputs, AttentionOutput]

# launch(tensors, softmax_scale, length, out, lse) -> (out, lse or None); None if a tensor is not aligned as the one bound to.
# ``tensors`` are Tensors, or the first three if the rest is None, or the public function's in the same order: only their
# addresses are used. softmax_scale: None for the default. length: keys of each sequence without ``cache_seqlens``. out, lse:
# tensors to write, None for new ones.
AttentionLaunch = Callable[
    ["tuple[torch.Tensor | None, ...]", "float | None", int, "torch.Tensor | None", "torch.Tensor | None"], "Result | None"
]


class Launcher(ABC):
    """A kernel with a config, for any lengths, batch and strides; all else is as in the inputs it was planned for: dtypes, head
    dimensions, features, alignment to 16 bytes, the kind of mask (equal lengths make the two causal ones one), whether the
    log-sum-exp is asked for, the sign of the scale. It holds no tensor.
    """

    any_keys = False  # whether a launch without lengths serves other numbers of keys than the one that it was bound to
    splits_keys = False  # whether ``num_splits`` may be above 1
    takes_length = False  # whether a launch takes one length in place of ``cache_seqlens``
    appends = False  # whether a launch may write new keys and values to a cache first

    @abstractmethod
    def bind(self, tensors: Tensors, options: Options, out: torch.Tensor | None = None) -> AttentionLaunch:
        """The launch for tensors of these shapes and strides. It compiles if need be, and raises CannotServe. ``out``: has the
        strides of the outputs that later calls pass."""


Plan = Callable[[AttentionInputs, Config], Launcher]
our_kernel = partial(AttentionKernel, origin="ours", op="attention")


class ProblemShape(NamedTuple):
    """The sizes of an AttentionProblem that a launch depends on, by the problem's names, without its checks."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    causal: bool
    causal_offset: int


def shape_of(tensors: Tensors, mask: Mask) -> ProblemShape:
    """The sizes of a call whose sequences have one length."""
    batch, heads, seqlen_q, _ = tensors.q.shape
    _, heads_kv, seqlen_k, _ = tensors.k.shape
    offset = seqlen_k - seqlen_q if mask == "causal" else 0
    return ProblemShape(batch, heads, heads_kv, seqlen_q, seqlen_k, mask != "full", offset)


def run_planned(plan: Plan) -> Callable[[AttentionInputs, Config], AttentionOutput]:
    """``Kernel.run`` of a kernel with that plan: plan, bind and launch once."""
    return lambda inputs, config: planned(plan, config, inputs)(inputs)


def planned(plan: Plan, config: Config, like: AttentionInputs) -> Callable[[AttentionInputs], AttentionOutput]:
    """A call of a kernel, built for inputs like these, on inputs that may have other strides: it allocates and launches."""
    from flashmoe_science.ops.attention.call.tensors import ALL_KEYS

    launcher = plan(like, config)
    launches: dict[Hashable, AttentionLaunch] = {}

    def bound(inputs: AttentionInputs) -> AttentionLaunch:
        every = (*inputs.tensors, inputs.out)
        key = tuple([None if one is None else (one.shape, one.stride(), one.data_ptr() & 15) for one in every])
        if key not in launches:
            launches[key] = launcher.bind(inputs.tensors, inputs.options, inputs.out)
        return launches[key]

    def call(inputs: AttentionInputs) -> AttentionOutput:
        result = bound(inputs)(inputs.tensors, inputs.softmax_scale, ALL_KEYS, inputs.out, None)
        assert result is not None, "a launch refuses the tensors that it was bound to"
        return AttentionOutput(*result)

    bound(like)
    return call


def finish(inputs: AttentionInputs, out: torch.Tensor, lse: torch.Tensor | None = None) -> AttentionOutput:
    """Copy into ``inputs.out`` if the caller gave one; peers allocate their own outputs."""
    if inputs.out is None:
        return AttentionOutput(out, lse)
    inputs.out.copy_(out)
    return AttentionOutput(inputs.out, lse)
