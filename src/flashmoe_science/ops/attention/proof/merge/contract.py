"""The contract of a merge: ``fn(outs, lses)`` with all parts in one tensor each, to (out, lse).

Some rows have none of a part's keys, the first none of any part's; there the part's output is NaN, which no call may read. Of
inputs only outputs are varied. A weight is the exponential of a difference of two log-sum-exps of at most M in size: in fp32 it
errs by 2 M 2^-24 and the exponential's own 2^-22. Merged one after the other, as rings do, P parts have sqrt(P) times that and
of sums 4 sqrt(P) 2^-24. Output and log-sum-exp may err by as much of the largest output and of 1, and by two roundings to their
dtypes; RMS and mean by half of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, ClassVar

import torch

from flashmoe_science.contract import Contract, Errors, Mistake, Output, unit_roundoff
from flashmoe_science.kernel import Config, Device
from flashmoe_science.operations import public
from flashmoe_science.ops.attention.call.merge import MergeInputs, MergeKernel, Result
from flashmoe_science.ops.attention.peers.merge import at_once
from flashmoe_science.ops.attention.problem.merge import AttentionMergeProblem
from flashmoe_science.ops.attention.proof.merge import suites
from flashmoe_science.ops.attention.proof.merge.oracle import merge_oracle

Inputs = Mapping[str, torch.Tensor]

_FP32 = 2.0**-24


def _as_made(parts: torch.Tensor) -> torch.Tensor:
    return parts


def _sliced(parts: torch.Tensor) -> torch.Tensor:
    """The first tokens and heads of twice as many."""
    return parts.repeat(1, 2, 2, *(1,) * (parts.dim() - 3))[:, : parts.shape[1], : parts.shape[2]]


def _reordered(parts: torch.Tensor) -> torch.Tensor:
    return parts.transpose(1, 2).contiguous().transpose(1, 2)


_VARIANTS: Mapping[str, dict[str, Any]] = {
    "log-sum-exps near 3000": {"mean": 3000.0},
    "log-sum-exps near -3000": {"mean": -3000.0},
    "log-sum-exps 100 apart": {"spread": 100.0},
    "slices of larger tensors": {"placed": _sliced},
    "heads and tokens in another memory order": {"placed": _reordered},
}


class AttentionMergeContract(Contract):
    """Attention to all keys from attention to parts of them; see the module."""

    name: ClassVar[str] = "attention_merge"
    outputs: ClassVar[tuple[Output, ...]] = (Output("out"), Output("lse"))
    sweep_variants: ClassVar[tuple[str, ...]] = tuple(_VARIANTS)

    def __init__(self, mean: float = 0.0, spread: float = 3.0, placed: Callable[..., torch.Tensor] = _as_made) -> None:
        self._mean, self._spread, self._placed = mean, spread, placed

    def variant(self, name: str) -> AttentionMergeContract:
        return AttentionMergeContract(**_VARIANTS[name])

    def default_problems(self) -> Sequence[str]:
        return suites.DEFAULT

    def sweep(self) -> Sequence[str]:
        return suites.SWEEP

    def small_problems(self) -> Sequence[str]:
        return suites.SMALL

    def build_problems(self) -> Sequence[str]:
        return suites.BUILD

    def suites(self) -> Mapping[str, Sequence[str]]:
        return suites.SUITES

    def draw(self, near: AttentionMergeProblem, chance: Random) -> AttentionMergeProblem:
        parts, tokens = chance.randint(2, 32), max(1, round(near.tokens * 2 ** chance.uniform(-2, 1)))
        return AttentionMergeProblem(parts, tokens, chance.randint(1, 64), 8 * chance.randint(4, 32), near.dtype)

    def inputs(
        self, problem: AttentionMergeProblem, device: torch.device, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        p = problem
        outs = torch.randn(p.parts, p.tokens, p.heads, p.head_dim, device=device, generator=generator)
        lses = torch.randn(p.parts, p.heads, p.tokens, device=device, generator=generator) * self._spread + self._mean
        keyless = torch.rand(lses.shape, device=device, generator=generator) < 0.2
        keyless[:, :, 0] = p.tokens > 1
        return {"outs": self._placed(outs.to(self.dtype(p))), "lses": self._placed(lses.masked_fill(keyless, -torch.inf))}

    def vary(self, distribution: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**inputs, **super().vary(distribution, {"outs": inputs["outs"]})}

    def poisoned(self, problem: AttentionMergeProblem, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        keyless = (inputs["lses"] == -torch.inf).transpose(1, 2).unsqueeze(-1)
        return {**inputs, "outs": inputs["outs"].masked_fill(keyless, torch.nan)}

    def reference(self, problem: AttentionMergeProblem, inputs: Inputs) -> Result:
        return merge_oracle(inputs["outs"], inputs["lses"])

    def plain(self, problem: AttentionMergeProblem, inputs: Inputs) -> Result:
        return at_once(inputs["outs"], inputs["lses"])

    def bounds(
        self, problem: AttentionMergeProblem, inputs: Inputs, reference: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[Errors, ...], tuple[float, ...]]:
        given = inputs["lses"], inputs["outs"]
        largest, of_outs = (one.masked_fill(~one.isfinite(), 0.0).abs().max().item() for one in given)
        fp32 = (4 + (2 * largest + 4) * math.sqrt(problem.parts)) * _FP32
        of_out, of_lse = fp32 * of_outs, fp32 + 2 * largest * _FP32
        rounded = 2 * unit_roundoff(inputs["outs"].dtype) * of_outs
        return tuple(Errors(one, one / 2, one / 2) for one in (of_out + rounded, of_lse)), (of_out, of_lse)

    def mistakes(self, problem: AttentionMergeProblem, inputs: Inputs) -> Iterator[Mistake]:
        outs, lses = inputs["outs"], inputs["lses"]
        out, lse = self.reference(problem, inputs)
        equal = torch.where(lses == -torch.inf, lses, 0.0)
        yield Mistake("unweighted", "it is right for the mean of the parts", (merge_oracle(outs, equal)[0], lse))
        yield Mistake("maximum", "it is right for the largest log-sum-exp", (out, lses.amax(0)))
        if problem.parts > 1:
            for name, rest in (("first", slice(1, None)), ("last", slice(-1))):
                without = merge_oracle(outs[rest], lses[rest])
                yield Mistake(f"without-{name}", f"it is right for all parts but the {name}", without)

    def for_kernel(self, problem: AttentionMergeProblem, inputs: Inputs) -> MergeInputs:
        return MergeInputs(inputs["outs"], inputs["lses"])

    def planned(self, kernel: MergeKernel, config: Config, like: MergeInputs) -> Callable[[MergeInputs], Result]:
        if kernel.plan is not None:
            kernel.plan(like, config)  # it builds, and the build is kept
        return super().planned(kernel, config, like)

    def user_call(
        self, kernel: MergeKernel, config: Config, problem: AttentionMergeProblem, device: Device
    ) -> Callable[[MergeInputs], Result] | None:
        """The public function, where it would run this config."""
        from flashmoe_science.ops.choose import would_run

        merge = public("flashmoe_science.attention:merge_attention")
        return (lambda inputs: merge(*inputs)) if would_run(kernel, config, problem, device) else None


CONTRACT = AttentionMergeContract()
