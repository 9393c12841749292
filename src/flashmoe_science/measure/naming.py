"""What kind of wrong a result looks like, from its errors alone or from a common mistake that it matches."""

from __future__ import annotations

import torch

from flashmoe_science.measure.tolerance import Expected, absolute_errors
from flashmoe_science.records import ErrorStats

Named = tuple[str, str]  # a code for machines, and words

_FEW = 8  # wrong elements that are still told by number
_EVEN = 60.0  # the largest error over the RMS: below it, every element is off alike
_COARSE = 2.0**-4  # of the largest result: an error that rounding to 8 bits may make
_MATCHES = 4.0  # times the bound: a mistake's result may be larger than the right one, and its roundings with it
_CLOSER = 0.25  # of the error against the right result


def is_mistake(got: torch.Tensor, right: Expected, mistake: torch.Tensor) -> bool:
    """Whether a result is what a common mistake computes: within a few bounds of it, and far closer to it than to ``right``."""
    both_nan = got.isnan() & mistake.isnan()
    error = absolute_errors(torch.where(both_nan, 0.0, got.double() - mistake))
    away = absolute_errors(torch.where(torch.isfinite(got), got.double() - right.value, torch.inf))
    close = error.max <= _MATCHES * right.bound.max and error.rms <= _MATCHES * right.bound.rms
    return close and error.rms < _CLOSER * away.rms


def kind_of_wrong(got: torch.Tensor, one: Expected, stats: ErrorStats) -> list[Named]:
    """What kind of wrong a result looks like, where its errors tell."""
    count = got.numel()
    if stats.nonfinite or not one.dtype.is_floating_point:
        return []
    if count > 1 and bool((got == got.reshape(-1)[0]).all()) and not bool((one.value == one.value.reshape(-1)[0]).all()):
        return [("constant", f"its output is constant ({got.reshape(-1)[0].item():g} everywhere)")]
    error = (got.double() - one.value).abs()
    wrong = int((error > one.bound.max).sum())
    if 0 < wrong <= min(_FEW, count // 4):
        return [("few-elements", f"{wrong} of {count} elements {'is' if wrong == 1 else 'are'} wrong, the rest are right")]
    there = _only_at(error > one.bound.max)
    if there is not None:
        return [("one-place", f"what is wrong lies {there}, the rest is right")]
    largest, rms = float(error.max()), float(error.square().mean().sqrt())
    scale = float(one.value.abs().max())
    if largest < _COARSE * scale and largest < _EVEN * rms:
        times = rms / max(one.bound.rms, 1e-300)
        words = f"every element is off a little, {times:.3g} times what is allowed: as lower precision inside makes it"
        return [("lower-precision", words)]
    return []


def _only_at(wrong: torch.Tensor) -> str | None:
    """Where along one dimension all that is wrong lies, if that is one place of several; None if it is not."""
    for dim, size in enumerate(wrong.shape):
        others = [one for one in range(wrong.dim()) if one != dim]
        (places,) = torch.nonzero(wrong.any(dim=others) if others else wrong, as_tuple=True)
        if size > 1 and len(places) == 1:
            return f"at index {int(places[0])} of dimension {dim} (of {size})"
    return None
