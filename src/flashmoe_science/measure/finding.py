"""The results of an exam: one call with its errors, the likely kind of a wrong result, and all faults as text and codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flashmoe_science.contract import Errors
from flashmoe_science.measure.inputs import in_parts
from flashmoe_science.measure.tolerance import Expected, errors_of
from flashmoe_science.records import ErrorStats

DISTRIBUTIONS = {  # distributions other than the normal one, as text
    "zeros": "all zero",
    "constant": "all the same",
    "large": "large",
    "huge": "huge",
    "tiny": "tiny",
    "opposed": "opposed (every score far below zero)",
    "crowded": "crowded (all tokens for the same experts)",
}
# Inputs on which often one path of a kernel alone is wrong: they are tried on every problem of a sweep.
HARD_DISTRIBUTIONS = ("large", "huge", "opposed", "crowded")
CALL_MODES = {  # modes of a call, as text
    "inference": "under torch.inference_mode()",
    "no_grad": "under torch.no_grad()",
    "gradients": "on inputs that require gradients",
    "autocast": "under torch.autocast to the dtype of its inputs",
    "default": "under torch.set_default_dtype to the dtype of its inputs",
    "thread": "on another thread",
}
ON_A_STREAM, REPEATEDLY = "on another stream", "called repeatedly"


@dataclass(slots=True)
class Finding:
    """The result of an exam. ``reasons`` are faults as text, none where it passed, ``codes`` name them for machines; ``notes``
    are no faults. ``stats`` are the errors of each output, by its name, on ordinary inputs."""

    stats: dict[str, ErrorStats] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    peak_extra_bytes: int | None = None
    output_bytes: int | None = None

    def fault(self, code: str, reason: str) -> None:
        """Add a reason; the code only where it is new."""
        self.reasons.append(reason)
        self.codes += [code] if code not in self.codes else []

    def also(self, other: Finding) -> None:
        """Add what another exam of the same problem found."""
        self.reasons += other.reasons
        self.codes += [one for one in other.codes if one not in self.codes]
        self.notes += [one for one in other.notes if one not in self.notes]

    def wrong(self, call: Call, how: str = "", code: str = "wrong-result") -> None:
        """Add the faults of a call: all of them, or after ``how`` the first; and the likely kind of mistake."""
        named = [words for _, words in call.named]
        if how:
            self.fault(code, "; ".join((f"{how}: {call.reasons[0]}", *named)))
        else:
            for words in (*call.reasons, *named):
                self.fault("wrong-kind" if call.other_kind else code, words)
        self.codes += [one for one, _ in call.named if one not in self.codes]


@dataclass(frozen=True, slots=True)
class Call:
    """One call and the oracle's result for it. ``named`` is the likely kind of mistake: pairs of a code and words."""

    facts: dict[str, Any]
    reasons: list[str]
    other_kind: bool = False  # wrong type, shape, dtype or device; the values were not checked
    named: Sequence[Named] = ()
    stats: dict[str, ErrorStats] = field(default_factory=dict)
    digest: str = ""
    vacuous: bool = False

    @property
    def nonfinite(self) -> int:
        return sum(one.nonfinite for one in self.stats.values())


def contract_mismatch(outputs: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], device: str) -> list[str]:
    """How the results differ from the contract in number, type, shape, dtype or device, as text."""
    required = sum(not one["optional"] for one in wanted)
    if not required <= len(outputs) <= len(wanted):
        given = f"a {outputs[0]['type']}" if len(outputs) == 1 else f"{len(outputs)} results"
        return [f"it returned {given}; it must return {required} result{'s' if required > 1 else ''}"]
    wrong = []
    for one, right in zip(outputs, wanted[: len(outputs)], strict=True):
        if one["type"] != "Tensor":
            wrong.append(f"it returned a {one['type']}, not a plain tensor")
        elif one["shape"] != right["shape"]:
            wrong.append(f"its output has shape {one['shape']}; it must be {right['shape']}")
        elif one["dtype"] != right["dtype"]:
            wrong.append(f"its output is {one['dtype']}; it must be {right['dtype']}")
        elif one["device"] != device:
            wrong.append(f"its output is on {one['device']}; the inputs are on {device}")
    return wrong


Named = tuple[str, str]  # a code for machines, and words

_FEW = 8  # wrong elements that are still listed one by one
_EVEN = 60.0  # the largest error over the RMS error, below which every element is off alike
_COARSE = 2.0**-4  # of the largest result: the largest error that rounding to 8 bits makes
_MATCHES = 4.0  # times the bound: a mistake's result, and so its rounding errors, may be larger than the right one's
_CLOSER = 0.25  # of the error against the right result: the most that the error against a mistake's result may be


def is_mistake(got: torch.Tensor, right: Expected, mistake: torch.Tensor) -> bool:
    """Whether a result is what a common mistake computes: within _MATCHES bounds of ``mistake``, and far closer to it than to
    ``right``."""

    def from_mistake(got: torch.Tensor, mistake: torch.Tensor) -> torch.Tensor:
        alike = (got == mistake) | (got.isnan() & mistake.isnan())  # infinities have no difference
        return torch.where(alike, 0.0, got.double() - mistake)

    def from_right(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.isfinite(got), got.double() - right, torch.inf)

    error, away = errors_of(from_mistake, got, mistake), errors_of(from_right, got, right.value)
    close = error.max <= _MATCHES * right.bound.max and error.rms <= _MATCHES * right.bound.rms
    return close and error.rms < _CLOSER * away.rms


def classify_error(got: torch.Tensor, one: Expected, stats: ErrorStats) -> list[Named]:
    """The likely kind of mistake in a wrong result, where its errors show it."""
    count = got.numel()
    if stats.nonfinite or not one.dtype.is_floating_point:
        return []
    constant = _constant(got)
    if count > 1 and constant is not None and _constant(one.value) is None:
        return [("constant", f"its output is constant ({constant:g} everywhere)")]
    places = torch.empty_like(got, dtype=torch.bool)
    for part, right, there in in_parts(got, one.value, places):
        torch.gt((part.double() - right).abs_(), one.bound.max, out=there)
    wrong = int(places.sum())
    if 0 < wrong <= min(_FEW, count // 4):
        return [("few-elements", f"{wrong} of {count} elements {'is' if wrong == 1 else 'are'} wrong, the rest are right")]
    where = _only_at(places)
    if where is not None:
        return [("one-place", f"what is wrong lies {where}, the rest is right")]
    error = errors_of(lambda part, right: part.double() - right, got, one.value)
    scale = Errors.of(one.value).max
    times = error.rms / max(one.bound.rms, 1e-300)
    if times > 1 and error.max < _COARSE * scale and error.max < _EVEN * error.rms:
        words = f"every element is off a little, {times:.3g} times what is allowed: as lower precision inside makes it"
        return [("lower-precision", words)]
    return []


def _constant(tensor: torch.Tensor) -> float | None:
    """The value of all elements; None where they differ."""
    first = tensor[(0,) * tensor.dim()]
    return first.item() if all(bool((part == first).all()) for (part,) in in_parts(tensor)) else None


def _only_at(wrong: torch.Tensor) -> str | None:
    """The one index of a dimension at which all wrong elements are, as text; None if there is no such index."""
    for dim, size in enumerate(wrong.shape):
        others = [one for one in range(wrong.dim()) if one != dim]
        (places,) = torch.nonzero(wrong.any(dim=others) if others else wrong, as_tuple=True)
        if size > 1 and len(places) == 1:
            return f"at index {int(places[0])} of dimension {dim} (of {size})"
    return None
