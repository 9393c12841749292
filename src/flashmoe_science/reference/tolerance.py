"""The one tolerance rule. Nothing in this project may loosen it.

An output passes when each of its maximum, RMS and mean absolute error against the fp64 oracle is

1. at most twice the error of the same maths done plainly in the input dtype (``attention_plain``), plus twice a rounding
   floor that is, element by element, the larger of ``|(ref + 0.3 - 0.3) - ref|`` evaluated in that dtype (FlashAttention-3's
   rule, hopper/test_flash_attn.py) and ``u |ref|``, what a correctly rounded result may be off by (``u`` is the unit roundoff;
   without it the floor of an output of a few elements is zero by luck), **and**
2. under an absolute cap, because a poor plain result would loosen the first.

The cap is derived. Attention's weights are positive and sum to one, so perturbing each weight, or the output, by a relative
``e`` moves the output by at most ``e max|V|``. A kernel may round four times to the input dtype (``u`` is 2^-8 for bf16, 2^-11
for fp16, 2^-24 for fp32): a scaled operand, a score, a weight, the output. Its scores, accumulated in fp32 over D products, err
by ``s = 4 sqrt(D) 2^-24 scale max||q|| max||k||`` (Higham and Mary 2019, with lambda = 4), and so its weights by a relative
``2 s``; the sums over Sk keys add ``4 sqrt(Sk) 2^-24``. Together: ``(4 u + 2 s + 4 sqrt(Sk) 2^-24) max|V|``. RMS and mean are
held to half of it, relative to the RMS of V.

Another operation's cap is its contract's own, or ``general_cap``: sixteen roundings of the largest result. Where the plain
result is not finite (scores that overflow fp16), the cap alone decides.

The log-sum-exp is fp32 for every input dtype: its plain version is done in fp32, and ``s`` is added to its floor, because
tensor cores sum in an order, and with a truncation, of their own. Where that floor is all there is, it is also the cap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashmoe_science.kernels.kernel import AttentionInputs, AttentionOutput
from flashmoe_science.records import ErrorStats
from flashmoe_science.reference.attention import attention_oracle, attention_plain

RATIO = 2.0
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_FP32 = UNIT_ROUNDOFF[torch.float32]
_ROUNDINGS = 16  # of the general cap


@dataclass(frozen=True, slots=True)
class Errors:
    """Maximum, RMS and mean of an absolute error, or a bound on each."""

    max: float
    rms: float
    mean: float

    def within(self, bound: Errors) -> bool:
        return self.max <= bound.max and self.rms <= bound.rms and self.mean <= bound.mean

    def least(self, other: Errors) -> Errors:
        return Errors(min(self.max, other.max), min(self.rms, other.rms), min(self.mean, other.mean))


@dataclass(frozen=True, slots=True)
class Reference:
    """What an output of one AttentionInputs is held against: the oracle's result and the bounds on the error."""

    out: torch.Tensor  # fp64 [B, H, Sq, Dv]
    lse: torch.Tensor  # fp64 [B, H, Sq]
    out_bound: Errors
    lse_bound: Errors


@dataclass(frozen=True, slots=True)
class Check:
    """The verdict on one output. ``reasons`` is empty exactly when it passed."""

    out: ErrorStats
    lse: ErrorStats | None
    reasons: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, slots=True)
class Expected:
    """What one result of any operation is held against. ``dtype`` is what it must come in."""

    value: torch.Tensor  # fp64
    bound: Errors
    dtype: torch.dtype


def expected(
    references: Sequence[torch.Tensor], plains: Sequence[torch.Tensor], caps: Sequence[Errors] | None
) -> tuple[Expected, ...]:
    """The rule for the results of one call: an fp64 reference, the plain result and a cap for each.

    Raises:
        ValueError: the plain results are not as many as the references, or not of their shapes.
    """
    if [one.shape for one in plains] != [one.shape for one in references]:
        shapes = [[tuple(one.shape) for one in many] for many in (references, plains)]
        raise ValueError(f"the reference gives shapes {shapes[0]} and the plain maths {shapes[1]}; they must agree")
    made = []
    for index, (reference, plain) in enumerate(zip(references, plains, strict=True)):
        value = reference.double()
        if not plain.is_floating_point():  # indices and counts are right or wrong
            made.append(Expected(value, Errors(0.0, 0.0, 0.0), plain.dtype))
            continue
        cap = general_cap(value, plain.dtype) if caps is None else caps[index]
        made.append(Expected(value, cap.least(_bound(value, plain, plain.dtype, extra=0.0)), plain.dtype))
    return tuple(made)


def general_cap(reference: torch.Tensor, dtype: torch.dtype) -> Errors:
    """Sixteen roundings to ``dtype`` of the largest result; RMS and mean are held to as many of the RMS of the results."""
    relative = _ROUNDINGS * UNIT_ROUNDOFF[dtype]
    sizes = torch.where(torch.isfinite(reference), reference, 0.0)
    typical = relative * sizes.square().mean().sqrt().item()
    return Errors(relative * sizes.abs().max().item(), typical, typical)


def attention_cap(inputs: AttentionInputs) -> Errors:
    """The derived cap on an attention output, as the module's docstring has it."""
    return _cap(inputs, _score_rounding(inputs))


def attention_reference(inputs: AttentionInputs) -> Reference:
    """Run the oracle and the plain version once; any number of outputs can then be checked against them."""
    out, lse = attention_oracle(inputs)
    plain_out, plain_lse = attention_plain(inputs)
    score = _score_rounding(inputs)
    loose = _bound(out, plain_out, inputs.q.dtype, extra=0.0)
    return Reference(out, lse, loose.least(_cap(inputs, score)), _bound(lse, plain_lse, torch.float32, extra=score))


def check_attention(output: AttentionOutput, reference: Reference) -> Check:
    """Hold an output, and its log-sum-exp where there is one, to the rule."""
    out, reasons = check_output("out", output.out, reference.out, reference.out_bound)
    if output.lse is None:
        return Check(out, None, tuple(reasons))
    lse, lse_reasons = check_output("lse", output.lse, reference.lse, reference.lse_bound)
    return Check(out, lse, (*reasons, *lse_reasons))


def _score_rounding(inputs: AttentionInputs) -> float:
    norms = [torch.linalg.vector_norm(tensor.float(), dim=-1).max().item() for tensor in (inputs.q, inputs.k)]
    return float(4 * math.sqrt(inputs.problem.head_dim) * _FP32 * abs(inputs.softmax_scale) * norms[0] * norms[1])


def _cap(inputs: AttentionInputs, score: float) -> Errors:
    relative = 4 * UNIT_ROUNDOFF[inputs.q.dtype] + 2 * score + 4 * math.sqrt(inputs.problem.seqlen_k) * _FP32
    values = inputs.v.float()
    typical = 0.5 * relative * values.square().mean().sqrt().item()
    return Errors(relative * values.abs().max().item(), typical, typical)


def _bound(reference: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype, extra: float) -> Errors:
    """Twice the plain version's error plus the rounding floor, each as maximum, RMS and mean."""
    finite = torch.where(torch.isfinite(reference), reference, 0.0)
    shifted = (finite.to(dtype) + 0.3 - 0.3).double()
    floor = _errors(torch.maximum((shifted - finite).abs(), UNIT_ROUNDOFF[dtype] * finite.abs()))
    error = _errors(_difference(plain, reference))
    return Errors(
        max=RATIO * error.max + 2.0 * floor.max + extra,
        rms=RATIO * error.rms + 2.0 * floor.rms + extra,
        mean=RATIO * error.mean + 2.0 * floor.mean + extra,
    )


def _errors(difference: torch.Tensor) -> Errors:
    size = difference.abs()
    return Errors(size.max().item(), size.square().mean().sqrt().item(), size.mean().item())


def _difference(got: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """got - reference in fp64; 0 where both are -inf (the log-sum-exp of a row that sees no key), else NaN or Inf stay."""
    got = got.double()
    return torch.where((got == -torch.inf) & (reference == -torch.inf), 0.0, got - reference)


def check_output(what: str, got: torch.Tensor, reference: torch.Tensor, bound: Errors) -> tuple[ErrorStats, list[str]]:
    """Hold one result to its bound. Returns its errors and, in words, where they are too large."""
    if got.shape != reference.shape:
        raise ValueError(f"{what} has shape {tuple(got.shape)}; it must be {tuple(reference.shape)}")
    size = _difference(got, reference).abs()
    bad = ~torch.isfinite(size)
    nonfinite = int(bad.sum().item())
    # NaN has no order; counted as the largest error there is, it is what `worst` points at.
    worst = [int(index) for index in torch.unravel_index(torch.where(bad, torch.inf, size).argmax(), size.shape)]
    error = Errors(math.nan, math.nan, math.nan) if nonfinite else _errors(size)
    stats = ErrorStats(
        max=None if nonfinite else error.max,
        rms=None if nonfinite else error.rms,
        mean=None if nonfinite else error.mean,
        worst=worst,
        bound_max=bound.max,
        bound_rms=bound.rms,
        bound_mean=bound.mean,
        nonfinite=nonfinite,
    )
    if nonfinite:
        return stats, [f"{what} is NaN or infinite at {nonfinite} of {size.numel()} places, the first at {worst}"]
    reasons = [
        f"{what}: {name} error {found:.3g} is above {allowed:.3g}" + (f" (at {worst})" if name == "maximum" else "")
        for name, found, allowed in (
            ("maximum", error.max, bound.max),
            ("RMS", error.rms, bound.rms),
            ("mean", error.mean, bound.mean),
        )
        if not found <= allowed
    ]
    return stats, reasons
