"""The contract of the backward: ``fn(q, k, v, causal=False, softmax_scale=None)``, differentiable through autograd.

A candidate is called with leaves, and asked for the gradients of what it returns (the first of a tuple) by ``dout``: dq, dk and
dv, then those of the sinks and of an additive bias where the problem has them. One that returns a log-sum-exp [B, H, S] as the
second of a tuple, which requires gradients, is asked for those too: FlashAttention-3 drops them in silence. A kernel of the
package is given O and the log-sum-exp too, as the fp64 oracle has them, rounded once. A gradient that it does not give counts
as zero.

The cap is derived. An element of dS is P (dP - delta), in size at most T = P (|dP| + |delta|), with dLSE in delta. A kernel
may round six times to the input dtype (``u``): P, dS, O in delta, a scaled operand, dP, the result; a soft cap and a bias add
one each. Scores accumulated in fp32 err by ``s`` as in the forward, the log-sum-exp by ``l = 2^-24 |lse|``, its rounding to
fp32, and sums of fp32 by ``f = 4 sqrt(n) 2^-24``, of at most n terms: D, Dv, the keys, or the queries of a key head. With
``e = 6 u + 2 s + l + f`` an element of dQ errs by ``e scale max|K|`` times the largest sum of T over a row, of dK by ``e scale
max|Q|`` times that over a column, of dV by ``e max|dO|`` times that of P over a column; the oracle knows the sums. A sink's
gradient, of which there may be one, is a sum of products P dO O that may cancel: its size is at least their 2-norm, with which
the error of a rounded O goes. RMS and mean are held to half of it. Each P, dS and result errs by half of the dtype's least
number too, which of fp16 counts: gradients as small as that are lost without a loss scale.

What is lost is added to the cap and to the rounding floor, a term at a time, and is never more than the term. A GPU may flush
fp32 numbers below F = 2^-126 to zero, as ``ex2.approx.ftz`` does: P loses at most ``min(P, F)``; dS, by its P or by itself, at
most ``min(T, F (1 + |dP| + |delta|))``; a row's part of a sink's gradient likewise, with delta alone. An element of O below the
normal numbers of the input dtype errs, before it comes, by half of the least number, which is ``u`` times the least normal one,
or is flushed: delta errs by the sum of ``|dO|`` times what that is more than ``u |O|``, and dS by P times that. Sums over rows
and columns have all terms' losses, in the place of ``e T``. Where P and O are normal numbers this is some 2^-126 a term.

To the rounding floor is added what the plain maths may be spared by luck, as on inputs that are all alike: ``f``, as sums in
fp32 differ with their order; that P is exp(score - lse), of a score that is computed anew, ``s``, and a log-sum-exp that was
rounded, ``l``, where a softmax has the error of a large score above and below the line; and that O is rounded to the input
dtype before it comes. Delta then errs by ``u sum(|dO| |O|)``, with one sign where all elements of O are alike, and through it
dQ by ``scale`` times that times ``|P K|``, dK by ``scale`` times the sum over queries of that times ``P |Q|``, a sink's
gradient by the sum of that times the sink's probability, dS by ``P`` times that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from flashmoe_science.contract import Errors, Output, unit_roundoff
from flashmoe_science.kernel import Config
from flashmoe_science.ops.attention.call.backward import BackwardInputs, BackwardKernel, Gradients, Saved, Wanted, planned
from flashmoe_science.ops.attention.call.kernel import AttentionInputs
from flashmoe_science.ops.attention.call.tensors import Tensors
from flashmoe_science.ops.attention.problem import AttentionProblem
from flashmoe_science.ops.attention.problem.backward import AttentionBackwardProblem
from flashmoe_science.ops.attention.proof import inputs as features_inputs
from flashmoe_science.ops.attention.proof import memory
from flashmoe_science.ops.attention.proof.backward import suites
from flashmoe_science.ops.attention.proof.backward.oracle import (
    Mass,
    backward_oracle,
    backward_plain,
    expansion_of,
    masses_of,
    of_rounded_out,
)
from flashmoe_science.ops.attention.proof.contract import CONTRACT as FORWARD
from flashmoe_science.ops.attention.proof.contract import HIDDEN_KEYS, IN_MEMORY, AttentionContract, Placed, SharedContract
from flashmoe_science.ops.attention.proof.oracle import attention_oracle
from flashmoe_science.ops.gradients import AFTER_ANOTHER, AFTER_CHANGE, OF_OUTPUT, ONE_BY_ONE, gradients_of, output_of

Inputs = Mapping[str, torch.Tensor]

_FP32 = 2.0**-24


class AttentionBackwardContract(SharedContract):
    """Gradients of softmax(Q K^T * scale + mask) V; see the module. With ``of_lse`` the log-sum-exp has a gradient
    too; ``asked`` says how else gradients are asked for."""

    name: ClassVar[str] = "attention_backward"
    lists: ClassVar[Any] = suites
    outputs: ClassVar[tuple[Output, ...]] = (Output("dq"), Output("dk"), Output("dv"))
    calls: ClassVar[tuple[str, ...]] = ("autocast", "default", "thread")  # autograd has modes of its own
    everywhere: ClassVar[tuple[str, ...]] = (OF_OUTPUT,)
    sweep_variants: ClassVar[tuple[str, ...]] = (
        *IN_MEMORY, HIDDEN_KEYS, "a gradient of stride 0 (of a sum)", "a gradient in another memory order",
        "a gradient into the log-sum-exp too", ONE_BY_ONE, AFTER_ANOTHER, AFTER_CHANGE,
    )  # fmt: skip

    def __init__(
        self,
        stretch: float = 1.0,
        explicit: bool = True,
        sliced: bool = False,
        of_lse: bool = False,
        asked: str = "",
        placed: Placed = memory.as_made,
    ) -> None:
        super().__init__(stretch, explicit, sliced, placed=placed)
        self._of_lse, self._asked = of_lse, asked

    def variant(self, name: str) -> Any:
        return _Output() if name == OF_OUTPUT else super().variant(name)

    def cannot(self, problem: Any) -> str | None:
        return super().cannot(problem) or FORWARD.cannot_call(problem)

    def inputs(
        self, problem: AttentionBackwardProblem, device: torch.device, generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        made = features_inputs.make_tensors(problem, self.dtype(problem), device, generator, self._sliced)
        rows = made["q"].shape[:3]
        of_out = (*rows, problem.head_dim_v)
        rows_first, sliced = problem.layout == "bshd", self._sliced
        made["dout"] = features_inputs.normal(of_out, rows_first, made["q"].dtype, device, generator, sliced)
        if self._of_lse:
            made["dlse"] = torch.empty(rows, device=device).normal_(generator=generator)
        return self._placed(made)

    def vary(self, distribution: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return FORWARD.vary(distribution, inputs)

    def call(self, fn: Callable[..., Any], problem: AttentionBackwardProblem, inputs: Inputs) -> Any:
        """Called as the forward's contract calls a candidate, then differentiated."""
        into = [inputs[name] for name in ("dout", "dlse") if name in inputs]
        scaled = FORWARD if self._explicit and self._stretch == 1.0 else type(FORWARD)(self._stretch, self._explicit)

        def forward(leaves: dict[str, torch.Tensor]) -> list[torch.Tensor]:
            result = scaled.returned(fn, problem, {**inputs, **leaves})
            results = list(result) if isinstance(result, tuple) else [result]
            if len(into) > 1 and not _is_differentiable_lse(results[1:], inputs["dlse"]):
                raise ValueError("it returns no log-sum-exp that requires gradients")
            return results[: len(into)]

        return gradients_of(forward, _differentiated(inputs), into, self._asked)

    def reference(self, problem: AttentionBackwardProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return backward_oracle(self._for_backward(problem, inputs))

    def plain(self, problem: AttentionBackwardProblem, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return backward_plain(self._for_backward(problem, inputs))

    def bounds(
        self, problem: AttentionBackwardProblem, inputs: Inputs, reference: tuple[torch.Tensor, ...]
    ) -> tuple[tuple[Errors, ...], tuple[float, ...]]:
        features, given, unit = problem.features, self._for_backward(problem, inputs), unit_roundoff(inputs["q"].dtype)
        count = 6 + (features.softcap > 0) + (features.bias in ("alibi", "additive"))
        score = FORWARD.score_rounding(problem, _of_call(inputs), given.softmax_scale)
        mass, lost = masses_of(given)
        alike, of_lost = _sums(problem) + score + mass.rounded_lse, _errors(given, lost, 1.0)
        small = map(sum, zip(_of_least(problem, given, unit * torch.finfo(inputs["q"].dtype).tiny), of_lost, strict=False))
        caps = tuple(
            Errors(one + least, 0.5 * one + least, 0.5 * one + least)
            for one, least in zip(_errors(given, mass, count * unit + score + alike), small, strict=True)
        )
        of_out = (unit * one for one in of_rounded_out(given))
        return caps, tuple(map(sum, zip(_errors(given, mass, alike), of_out, of_lost, strict=True)))

    def for_kernel(self, problem: AttentionBackwardProblem, inputs: Inputs) -> BackwardInputs:
        given = self._for_backward(problem, inputs)
        if not given.tensors.q.is_meta:
            self.renew(problem, inputs, given)
        return given

    def renew(self, problem: AttentionBackwardProblem, inputs: Inputs, given: BackwardInputs) -> None:
        """The forward's results."""
        wide = AttentionInputs(problem, _widened(given.tensors), given.options, given.softmax_scale)
        out, lse = attention_oracle(wide)
        given.saved.out.copy_(out)
        given.saved.lse.copy_(lse)

    def _for_backward(self, problem: AttentionBackwardProblem, inputs: Inputs) -> BackwardInputs:
        """The call without the forward's results, for which there is memory."""
        tensors, options = features_inputs.call_of(problem, _of_call(inputs))
        features, dout = problem.features, inputs["dout"]
        wanted = Wanted(dsinks=features.sinks, dbias=features.bias == "additive")
        lse = torch.empty(tensors.q.shape[:3], dtype=torch.float32, device=tensors.q.device)
        saved = Saved(torch.empty_like(dout), lse, dout, inputs.get("dlse"))
        return BackwardInputs(problem, tensors, saved, options, self._scale(problem), wanted)

    def from_kernel(self, result: Gradients) -> tuple[torch.Tensor, ...]:
        return tuple(one for one in result if one is not None)

    def planned(self, kernel: BackwardKernel, config: Config, like: BackwardInputs) -> Callable[[BackwardInputs], Gradients]:
        return super().planned(kernel, config, like) if kernel.plan is None else planned(kernel.plan, config, like)


class _Output(AttentionContract):
    """The output of a candidate of the backward, called as for a training step."""

    def call(self, fn: Callable[..., Any], problem: AttentionProblem, inputs: Inputs) -> Any:
        of_call = super().call
        return output_of(lambda leaves: of_call(fn, problem, {**inputs, **leaves}), _differentiated(inputs))


def _differentiated(inputs: Inputs) -> Inputs:
    every = {name: inputs[name] for name in ("q", "k", "v", "sinks", "bias") if name in inputs}
    return {name: one for name, one in every.items() if one.is_floating_point()}


def _is_differentiable_lse(others: list[Any], dlse: torch.Tensor) -> bool:
    """Whether what a candidate returns besides its output begins with a log-sum-exp that has a gradient."""
    lse = others[0] if others else None
    return isinstance(lse, torch.Tensor) and lse.requires_grad and (lse.shape, lse.dtype) == (dlse.shape, dlse.dtype)


def _sums(problem: AttentionBackwardProblem) -> float:
    queries = problem.seqlen_q * problem.heads // problem.heads_kv
    return 4 * math.sqrt(max(problem.head_dim, problem.head_dim_v, problem.seqlen_k, queries)) * _FP32


def _errors(given: BackwardInputs, mass: Mass, relative: float) -> tuple[float, ...]:
    """The most that each gradient errs by where P and dS err by ``relative``; see the module."""
    x, scale = given.tensors, abs(given.softmax_scale)
    of_q, of_k, of_dout = (one.abs().max().item() for one in (x.q, x.k, given.saved.dout))
    every = [mass.row * of_k * scale, mass.column * of_q * scale, mass.of_p * of_dout]
    if given.wanted.dsinks:
        every.append(mass.sink)
    if given.wanted.dbias and x.bias is not None:
        every.append(mass.element * expansion_of(x.bias))
    return tuple(relative * one for one in every)


def _of_least(problem: AttentionBackwardProblem, given: BackwardInputs, least: float) -> tuple[float, ...]:
    """The most that each gradient errs by where every P, dS and result errs by ``least``."""
    x, scale, queries = given.tensors, abs(given.softmax_scale), problem.seqlen_q * problem.heads // problem.heads_kv
    of_q, of_k, of_dout = (one.abs().max().item() for one in (x.q, x.k, given.saved.dout))
    sums = (problem.seqlen_k * of_k * scale, queries * of_q * scale, queries * of_dout, 0.0, 0.0)
    return tuple(least * (1.0 + one) for one in sums)


def _of_call(inputs: Inputs) -> Inputs:
    return {name: one for name, one in inputs.items() if name not in ("dout", "dlse")}


def _widened(tensors: Tensors) -> Tensors:
    wide = {name: one.double() for name, one in tensors._asdict().items() if one is not None and one.is_floating_point()}
    return tensors._replace(**wide)


CONTRACT = AttentionBackwardContract()
