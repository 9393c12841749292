"""A hypothesis about a kernel's time: a cause that the numbers support, rule out or cannot test, and the change for it.

Changes of the whole time (more SMs at work) multiply; changes of parts add their savings, the parts treated as disjoint: the
most that they can give. No sum gets below the time that the binding ceiling alone takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from flashmoe_science.records import Clock

Status = Literal["supported", "ruled out", "untested"]

BOUND = 0.6  # of a ceiling: from here on the time is bound by it; Nsight Compute draws its line there too
FREE = 0.3  # of a ceiling: below this the time is not bound by it, even if the estimate is off by half
TENSOR_IDLE = 0.005  # of the cycles: no more than stray instructions
_MOST_OF_A_TIME = 0.99  # that a change can take away altogether: something is always left
_WORTH_A_STEP = 1.02  # less is within the noise


def amdahl(part: float, speedup: float) -> float:
    """The speed-up of a whole of which ``part`` (0 to 1) is sped up ``speedup`` times, which may be infinite."""
    left = (1 - part) + part / speedup
    return math.inf if left == 0 else 1 / left


@dataclass(frozen=True, slots=True)
class Change:
    """A change that speeds ``part`` of a time (0 to 1) up ``speedup`` times, which is infinite where the part would go.

    ``clock`` is the time that it is a part of: "eager" what a caller waits, None the device's. ``how`` is the source of
    the two numbers. A plan adds ``most_gain``, what the change can give at the most by itself, and ``together``, what it
    gives with those before it in the plan; ``capped`` where the machine's binding ceiling set that."""

    what: str
    part: float
    speedup: float
    how: str
    clock: Clock | None = None
    most_gain: float = 1.0
    together: float = 1.0
    capped: bool = False


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """``evidence`` is a sentence with the numbers that decide in it. ``change`` is what a supported one calls for, None where
    its gain is unknown."""

    status: Status
    evidence: str
    change: Change | None = None
    key: str = ""
    title: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("key", "title", "status", "evidence")}


NO_COUNTERS = Hypothesis("untested", "to know takes counters")


def untested(evidence: str) -> Hypothesis:
    return Hypothesis("untested", evidence)


def ruled_out(evidence: str) -> Hypothesis:
    return Hypothesis("ruled out", evidence)


def by_share(share: float, words: str) -> Hypothesis:
    """Bound by a unit where counters saw at least BOUND of its peak in use."""
    return Hypothesis("supported" if share >= BOUND else "ruled out", f"{share:.1%} {words}")


def by_least(share: float, evidence: str) -> Hypothesis:
    """Bound by a ceiling of which the problem's own need reaches ``share``, at the least."""
    return Hypothesis("supported" if share >= BOUND else "ruled out" if share < FREE else "untested", evidence)


def shares_words(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))


def plan(found: Iterable[Hypothesis], device: Clock, roof: float) -> tuple[Hypothesis, ...]:
    """The supported hypotheses that call for a change worth a step, the largest gain first, each change with its gain.

    ``device`` is the clock of the device's time, of which the machine allows a speed-up of ``roof`` at the most. Changes of a
    caller's time come last: that ceiling is not the caller's."""
    calling = [
        (one, _with_gain(one.change, device, roof)) for one in found if one.status == "supported" and one.change is not None
    ]
    calling = [(one, change) for one, change in calling if change.most_gain >= _WORTH_A_STEP]
    calling.sort(key=lambda pair: (pair[1].clock != device, -pair[1].most_gain))
    changes = [change for _, change in calling]
    made = []
    for place, (one, change) in enumerate(calling):
        together = _together([before for before in changes[: place + 1] if before.clock == change.clock])
        capped = change.clock == device and together > roof
        made.append(replace(one, change=replace(change, together=roof if capped else together, capped=capped)))
    return tuple(made)


def _with_gain(change: Change, device: Clock, roof: float) -> Change:
    clock, part = change.clock or device, min(change.part, _MOST_OF_A_TIME if math.isinf(change.speedup) else 1.0)
    gain = amdahl(part, change.speedup)
    return replace(change, clock=clock, part=part, most_gain=min(gain, roof) if clock == device else gain)


def _together(changes: Sequence[Change]) -> float:
    """The speed-up of several changes of one time."""
    whole = math.prod(change.speedup for change in changes if change.part == 1)
    parts = [(change.part, change.speedup) for change in changes if change.part < 1]
    weight = sum(part for part, _ in parts)
    shrink = 1 / weight if weight > 1 else 1.0  # parts that overlap cannot together be more than all of the time
    left = 1 - sum(part * shrink * (1 - 1 / speedup) for part, speedup in parts)
    return math.inf if left <= 0 else whole / left
