"""The one tolerance rule. Nothing in this project may loosen it.

An output passes when each of its maximum, RMS and mean absolute error against the fp64 oracle is

1. at most twice the error of the same maths done plainly in the input dtype (``Contract.plain``), plus twice a rounding
   floor that is, element by element, the larger of ``|(ref + 0.3 - 0.3) - ref|`` evaluated in that dtype (FlashAttention-3's
   rule, hopper/test_flash_attn.py) and ``u |ref|``, what a correctly rounded result may be off by (``u`` is the unit roundoff;
   without it the floor of an output of a few elements is zero by luck), **and**
2. under an absolute cap, because a poor plain result would loosen the first.

A contract may give a cap of its own (``Contract.cap``); without one it is ``general_cap``, sixteen roundings of the largest
result. Where the plain result is not finite (scores that overflow fp16), the cap alone decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flashmoe_science.contract import Errors, unit_roundoff
from flashmoe_science.records import ErrorStats

RATIO = 2.0
_ROUNDINGS = 16  # of the general cap


@dataclass(frozen=True, slots=True)
class Expected:
    """What one result of any operation is held against. ``dtype`` is what it must come in."""

    value: torch.Tensor  # fp64
    bound: Errors
    dtype: torch.dtype


def expected(
    references: Sequence[torch.Tensor],
    plains: Sequence[torch.Tensor],
    caps: Sequence[Errors] | None,
    roundings: Sequence[float] | None = None,
) -> tuple[Expected, ...]:
    """The rule for the results of one call: an fp64 reference, the plain result and a cap for each, and what ``roundings`` add
    to the rounding floor of each.

    Raises:
        ValueError: the plain results are not as many as the references, or not of their shapes.
    """
    if [one.shape for one in plains] != [one.shape for one in references]:
        shapes = [[tuple(one.shape) for one in many] for many in (references, plains)]
        raise ValueError(f"the reference gives shapes {shapes[0]} and the plain maths {shapes[1]}; they must agree")
    made = []
    for index, (reference, plain) in enumerate(zip(references, plains, strict=True)):
        value = reference.double()
        if plain.is_floating_point():
            cap = general_cap(value, plain.dtype) if caps is None else caps[index]
            bound = cap.least(_bound(value, plain, 0.0 if roundings is None else roundings[index]))
        else:  # indices and counts are right or wrong
            bound = Errors(0.0, 0.0, 0.0)
        made.append(Expected(value, bound, plain.dtype))
    return tuple(made)


def general_cap(reference: torch.Tensor, dtype: torch.dtype) -> Errors:
    """Sixteen roundings to ``dtype`` of the largest result; RMS and mean are held to as many of the RMS of the results."""
    relative = _ROUNDINGS * unit_roundoff(dtype)
    sizes = absolute_errors(torch.where(torch.isfinite(reference), reference, 0.0))
    return Errors(relative * sizes.max, relative * sizes.rms, relative * sizes.rms)


def _bound(reference: torch.Tensor, plain: torch.Tensor, extra: float) -> Errors:
    """Twice the plain version's error plus the rounding floor, each as maximum, RMS and mean."""
    dtype = plain.dtype
    finite = torch.where(torch.isfinite(reference), reference, 0.0)
    shifted = (finite.to(dtype) + 0.3 - 0.3).double()
    floor = absolute_errors(torch.maximum((shifted - finite).abs(), unit_roundoff(dtype) * finite.abs()))
    error = absolute_errors(_difference(plain, reference))
    return Errors(
        max=RATIO * error.max + 2.0 * floor.max + extra,
        rms=RATIO * error.rms + 2.0 * floor.rms + extra,
        mean=RATIO * error.mean + 2.0 * floor.mean + extra,
    )


def absolute_errors(difference: torch.Tensor) -> Errors:
    """Maximum, RMS and mean of the size of a difference, each NaN or infinite where an element is."""
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
    place = int(torch.where(bad, torch.inf, size).argmax())
    worst = [int(index) for index in np.unravel_index(place, size.shape)]
    error = None if nonfinite else absolute_errors(size)
    stats = ErrorStats(
        max=None if error is None else error.max,
        rms=None if error is None else error.rms,
        mean=None if error is None else error.mean,
        worst=worst,
        bound_max=bound.max,
        bound_rms=bound.rms,
        bound_mean=bound.mean,
        nonfinite=nonfinite,
    )
    if error is None:
        return stats, [f"{what} is NaN or infinite at {nonfinite} of {size.numel()} places, the first at {worst}"]
    held = (("maximum", error.max, bound.max), ("RMS", error.rms, bound.rms), ("mean", error.mean, bound.mean))
    return stats, [
        f"{what}: {name} error {found:.3g} is above {allowed:.3g}" + (f" (at {worst})" if name == "maximum" else "")
        for name, found, allowed in held
        if not found <= allowed
    ]
