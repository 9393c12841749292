"""The one tolerance rule. Nothing in this project may loosen it.

An output passes when each of its maximum, RMS and mean absolute error against the fp64 oracle is

1. at most twice the error of the same maths done plainly in the input dtype (``Contract.plain``), or the allowance for chance
   (below) where that is more, plus twice a rounding floor. The floor is, element by element, the larger of ``|(ref + 0.3 -
   0.3) - ref|`` evaluated in that dtype (FlashAttention-3's rule, hopper/test_flash_attn.py) and ``u |ref|``, the error of a
   correctly rounded result (``u`` is the unit roundoff; without this term the floor of a few elements is zero by luck), **and**
2. under an absolute cap, because a poor plain result would loosen the first bound.

fp32's smallest normal number is added to both bounds: GPUs' exponentials give 0 below it.

A contract may give a cap of its own (``Contract.cap``); without one it is ``general_cap``, sixteen roundings of the largest
result. Where the plain result is not finite (scores that overflow fp16), the cap alone decides.

**Chance.** The plain maths makes one random draw of rounding errors, a kernel another. A few elements decide a maximum, and
RMS and mean too where few errors are large (one query of a nearly one-hot softmax in fp32): the error of one correct draw is
then often more than twice that of another. The allowance is a quantile of Gumbel's law, which maxima of many errors approach:
one comparison in ten million exceeds it (``by_chance``). The law's two parameters come from the moments of the plain errors on
the same inputs, a little disturbed (``inputs.disturb``), so that all roundings are drawn anew. A run makes a hundred to a
thousand comparisons: chance condemns about one run in ten thousand. An RMS over many errors hardly varies from draw to draw:
there twice the plain error is more, and decides. docs/design/0015 derives the allowance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass

import numpy as np
import torch

from flashmoe_science.contract import Errors, unit_roundoff
from flashmoe_science.measure.inputs import in_parts
from flashmoe_science.records import ErrorStats

RATIO = 2.0
DRAWS = 33
_ROUNDINGS = 16  # of the general cap
_FLUSHED = torch.finfo(torch.float32).tiny
_NONE = Errors(0.0, 0.0, 0.0)
_WORDS = {"max": "maximum", "rms": "RMS", "mean": "mean"}
_FALSE_ALARM = 1e-7  # of one comparison
# Standard deviations above the mean beyond which Gumbel's law has that probability: 12.1.
_DEVIATIONS = math.sqrt(6) / math.pi * (-math.log(_FALSE_ALARM) - np.euler_gamma)


@dataclass(frozen=True, slots=True)
class Expected:
    """The reference and the bounds of one result. ``dtype`` is that of the result; ``chance`` is the plain error with the
    allowance for chance, None until it is computed."""

    value: torch.Tensor  # fp64
    dtype: torch.dtype
    plain: Errors
    floor: Errors
    cap: Errors
    chance: Errors | None = None

    @property
    def bound(self) -> Errors:
        parts = zip(astuple(self.plain), astuple(self.chance or _NONE), astuple(self.floor), strict=True)
        # A plain error may be NaN; max and least then take their other argument, so that the cap decides.
        return self.cap.least(Errors(*(max(RATIO * plain, chance) + floor for plain, chance, floor in parts)))

    def basis(self, name: str) -> str:
        """The terms of the bound on the "max", "rms" or "mean", as text."""
        plain, chance, floor = (getattr(one, name) for one in (self.plain, self.chance or _NONE, self.floor))
        if getattr(self.bound, name) == (cap := getattr(self.cap, name)):
            words = f", which the same maths done plainly in {str(self.dtype).removeprefix('torch.')} exceeds too ({plain:.3g})"
            return f"the absolute cap{words if plain > cap else ''}"
        error = f"{chance:.3g} that chance makes of" if chance > RATIO * plain else "twice"
        return f"{error} the plain maths' {plain:.3g}, and {floor:.3g} for rounding"


def expected(
    references: Sequence[torch.Tensor],
    plains: Sequence[torch.Tensor],
    caps: Sequence[Errors] | None,
    roundings: Sequence[float] | None = None,
) -> tuple[Expected, ...]:
    """The rule for the results of one call: an fp64 reference, the plain result and a cap for each, and what ``roundings`` add
    to the rounding floor of each. Raises ValueError: the plain results are not as many as the references, or not of their
    shapes."""
    if [one.shape for one in plains] != [one.shape for one in references]:
        shapes = [[tuple(one.shape) for one in many] for many in (references, plains)]
        raise ValueError(f"the reference gives shapes {shapes[0]} and the plain maths {shapes[1]}; they must agree")
    made = []
    for index, (reference, plain) in enumerate(zip(references, plains, strict=True)):
        value = reference.double()
        if plain.is_floating_point():
            cap = general_cap(value, plain.dtype) if caps is None else caps[index]
            extra = _FLUSHED + (0.0 if roundings is None else roundings[index])
            floor, cap = _floor(value, plain.dtype, extra), Errors(*(one + _FLUSHED for one in astuple(cap)))
            made.append(Expected(value, plain.dtype, plain_error(value, plain), floor, cap))
        else:  # indices and counts are right or wrong
            made.append(Expected(value, plain.dtype, _NONE, _NONE, _NONE))
    return tuple(made)


def plain_error(reference: torch.Tensor, plain: torch.Tensor) -> Errors:
    """The errors of the plain maths."""
    return errors_of(_difference, plain, reference.double())


def by_chance(draws: Sequence[Errors]) -> Errors:
    """The plain error that chance is allowed: a quantile of Gumbel's law, fitted by moments to draws of the plain error. NaN,
    which allows nothing, where a draw is not finite."""
    each = torch.tensor([astuple(one) for one in draws], dtype=torch.float64)
    return Errors(*(each.mean(0) + _DEVIATIONS * each.std(0)).tolist())


def general_cap(reference: torch.Tensor, dtype: torch.dtype) -> Errors:
    """The general cap: sixteen roundings to ``dtype`` of the largest result, and of the RMS of the results for RMS and mean."""
    relative = _ROUNDINGS * unit_roundoff(dtype)
    sizes = errors_of(_finite, reference)
    return Errors(relative * sizes.max, relative * sizes.rms, relative * sizes.rms)


def _floor(reference: torch.Tensor, dtype: torch.dtype, extra: float) -> Errors:
    """Twice the rounding floor, as maximum, RMS and mean, and ``extra``."""

    def rounding(part: torch.Tensor) -> torch.Tensor:
        finite = _finite(part)
        shifted = (finite.to(dtype) + 0.3 - 0.3).double()
        return torch.maximum((shifted - finite).abs(), unit_roundoff(dtype) * finite.abs())

    floor = errors_of(rounding, reference)
    return Errors(2.0 * floor.max + extra, 2.0 * floor.rms + extra, 2.0 * floor.mean + extra)


def _finite(part: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(part), part, 0.0)


def errors_of(difference: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Errors:
    """The errors of a ``difference`` of tensors of one shape, which is computed a part at a time; each NaN or infinite where an
    element is."""
    total = tensors[0].numel()
    return combined([(part[0].numel() / total, Errors.of(difference(*part))) for part in in_parts(*tensors)])


def combined(parts: Sequence[tuple[float, Errors]]) -> Errors:
    """The errors of a whole, from (share of its elements, errors) of each part."""
    largest = float(np.max([one.max for _, one in parts]))  # NaN, where one is
    rms = math.hypot(*(one.rms * math.sqrt(share) for share, one in parts))
    return Errors(largest, rms, sum(one.mean * share for share, one in parts))


def _difference(got: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """got - reference in fp64; 0 where both are -inf (the log-sum-exp of a row that sees no key), else NaN or Inf stay."""
    got = got.double()
    return torch.where((got == -torch.inf) & (reference == -torch.inf), 0.0, got - reference)


def is_under_cap(stats: ErrorStats, right: Expected) -> bool:
    """Whether the errors of a result that is over its bound are under the absolute cap, so that the plain error decided."""
    if stats.max is None or stats.rms is None or stats.mean is None:
        return False
    return Errors(stats.max, stats.rms, stats.mean).within(right.cap)


def check_output(what: str, got: torch.Tensor, right: Expected) -> tuple[ErrorStats, list[str]]:
    """Compare one result with its bound. Returns its errors and, as text, which of them exceed which bound."""
    reference, bound = right.value, right.bound
    if got.shape != reference.shape:
        raise ValueError(f"{what} has shape {tuple(got.shape)}; it must be {tuple(reference.shape)}")
    parts, nonfinite, first, largest, place = [], 0, 0, -1.0, 0
    for part in in_parts(got, reference):
        size = _difference(*part).abs()
        parts.append((size.numel() / got.numel(), Errors.of(size)))
        bad = ~torch.isfinite(size)
        nonfinite += int(bad.sum().item())
        # NaN has no order; counted as the largest error there is, it is what `worst` points at.
        most, at = size.masked_fill_(bad, torch.inf).reshape(-1).max(0)
        if most > largest:
            largest, place = float(most), first + int(at)
        first += size.numel()
    worst = [int(index) for index in np.unravel_index(place, got.shape)]
    error = None if nonfinite else combined(parts)
    errors = dict.fromkeys(_WORDS) if error is None else asdict(error)
    bounds = {f"bound_{name}": value for name, value in asdict(bound).items()}
    stats = ErrorStats(**errors, **bounds, worst=worst, nonfinite=nonfinite)
    if error is None:
        return stats, [f"{what} is NaN or infinite at {nonfinite} of {got.numel()} places, the first at {worst}"]
    wrong = [name for name in _WORDS if not getattr(error, name) <= getattr(bound, name)]
    reasons = [f"{what}: {_WORDS[name]} error {getattr(error, name):.3g} is above {getattr(bound, name):.3g}" for name in wrong]
    if wrong:
        reasons[0] += f"{f' (at {worst})' if wrong[0] == 'max' else ''}: {right.basis(wrong[0])}"
    return stats, reasons
