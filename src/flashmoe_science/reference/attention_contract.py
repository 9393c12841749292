"""The attention contract: ``fn(q, k, v, causal=False, softmax_scale=None)`` on [B, H, S, D], exact, any strides.

``causal`` is FlashAttention's mask, the last query sees the last key; it is what ``causal=True`` says of a problem with the
word "causal". K and V may have fewer heads than Q. A tuple is taken for (out, ...), and only its first part is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from flashmoe_science.contract import DISTRIBUTIONS, Contract
from flashmoe_science.kernels.kernel import AttentionInputs
from flashmoe_science.problem import AttentionProblem, Problem
from flashmoe_science.reference.attention import attention_oracle, attention_plain
from flashmoe_science.reference.tolerance import Errors, attention_cap

Inputs = Mapping[str, torch.Tensor]


_ANOTHER, _DEFAULT = "another softmax scale", "the softmax scale left to its default"


class AttentionContract(Contract):
    """Softmax(Q K^T * scale + mask) V; see the module. ``stretch`` multiplies the usual scale, D to the -1/2; with ``explicit``
    False the scale is not passed."""

    name: ClassVar[str] = "attention"
    # "opposed": Q and K point away from each other, so that every score is far below zero.
    distributions: ClassVar[tuple[str, ...]] = (*DISTRIBUTIONS, "opposed")
    variants: ClassVar[tuple[str, ...]] = (_ANOTHER, _DEFAULT)

    def __init__(self, stretch: float = 1.0, explicit: bool = True) -> None:
        self._stretch, self._explicit = stretch, explicit

    def variant(self, name: str) -> AttentionContract:
        return AttentionContract(stretch=1.5) if name == _ANOTHER else AttentionContract(explicit=False)

    def default_problems(self) -> Sequence[Problem | str]:
        return ()  # a suite, which depends on the machine: measure.choice names it

    def cannot(self, problem: Any) -> str | None:
        reason = super().cannot(problem)
        if reason is None and problem.mask == "causal-topleft":
            return "causal=True says that the last query sees the last key; the contract has no word for another mask"
        return reason

    def inputs(self, problem: AttentionProblem, device: torch.device, generator: torch.Generator) -> dict[str, torch.Tensor]:
        shapes = {
            "q": (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim),
            "k": (problem.batch, problem.heads_kv, problem.seqlen_k, problem.head_dim),
            "v": (problem.batch, problem.heads_kv, problem.seqlen_k, problem.head_dim_v),
        }
        made = {}
        for name, (batch, heads, rows, width) in shapes.items():
            first = (rows, heads) if problem.layout == "bshd" else (heads, rows)
            flat = torch.empty((batch, *first, width), dtype=self.dtype(problem), device=device).normal_(generator=generator)
            made[name] = flat.transpose(1, 2) if problem.layout == "bshd" else flat
        return made

    def vary(self, distribution: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if distribution == "opposed":  # scores around -160 at the usual scale; exp(-104) is zero in fp32
            reach = 16.0 * inputs["q"].shape[-1] ** -0.25
            return inputs | {"q": inputs["q"].abs_().mul_(reach), "k": inputs["k"].abs_().mul_(-reach)}
        return super().vary(distribution, inputs)

    def call(self, fn: Callable[..., Any], problem: AttentionProblem, inputs: Inputs) -> Any:
        scale = {"softmax_scale": problem.softmax_scale * self._stretch} if self._explicit else {}
        result = fn(inputs["q"], inputs["k"], inputs["v"], causal=problem.causal, **scale)
        return result[0] if isinstance(result, tuple) and result else result

    def reference(self, problem: AttentionProblem, inputs: Inputs) -> torch.Tensor:
        return attention_oracle(self.for_kernel(problem, inputs))[0]

    def plain(self, problem: AttentionProblem, inputs: Inputs) -> torch.Tensor:
        return attention_plain(self.for_kernel(problem, inputs))[0]

    def cap(self, problem: AttentionProblem, inputs: Inputs, reference: tuple[torch.Tensor, ...]) -> tuple[Errors, ...]:
        return (attention_cap(self.for_kernel(problem, inputs)),)

    def for_kernel(self, problem: AttentionProblem, inputs: Inputs) -> AttentionInputs:
        return AttentionInputs(problem, inputs["q"], inputs["k"], inputs["v"], problem.softmax_scale * self._stretch)

    def from_kernel(self, result: Any) -> torch.Tensor:
        out: torch.Tensor = result.out
        return out
