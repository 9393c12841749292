"""A hypothesis about a kernel's time: a cause that the numbers support, rule out or cannot test, and the change for it.

Speed-ups of the whole time (more SMs at work) multiply. Changes of parts of the time add their savings, as if the parts were
disjoint: that is the most that they can give. Together they never get below the time that the binding ceiling alone takes.
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
_MOST_OF_A_TIME = 0.99  # the largest part of a time that a change can remove: something is always left
_WORTH_A_STEP = 1.02  # a smaller speed-up is within the noise


def amdahl(part: float, speedup: float) -> float:
    """The speed-up of a whole of which ``part`` (0 to 1) is made ``speedup`` times as fast, which may be infinite."""
    left = (1 - part) + part / speedup
    return math.inf if left == 0 else 1 / left


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes ``part`` (0 to 1) of a time ``speedup`` times as fast; infinite where it removes that part.

    ``clock`` names that time: "eager" is what a caller waits, None the device's time. ``how`` is the source of the two numbers.
    A plan adds ``most_gain``, the most that the change can give by itself, and ``together``, what it gives with the changes
    before it in the plan; ``capped``: the machine's binding ceiling limits ``together``."""

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
    """``evidence`` is a sentence with the deciding numbers. ``change`` is what a supported hypothesis calls for, None where its
    gain is unknown."""

    status: Status
    evidence: str
    change: Change | None = None
    key: str = ""
    title: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("key", "title", "status", "evidence")}


NO_COUNTERS = Hypothesis("untested", "only counters can tell")


def untested(evidence: str) -> Hypothesis:
    return Hypothesis("untested", evidence)


def ruled_out(evidence: str) -> Hypothesis:
    return Hypothesis("ruled out", evidence)


def by_share(share: float, words: str) -> Hypothesis:
    """Bound by a unit where counters saw at least BOUND of its peak in use."""
    return Hypothesis("supported" if share >= BOUND else "ruled out", f"{share:.1%} {words}")


def by_least(share: float, evidence: str) -> Hypothesis:
    """Bound by a ceiling where the problem's own need alone takes BOUND of it, ruled out where it takes less than FREE."""
    return Hypothesis("supported" if share >= BOUND else "ruled out" if share < FREE else "untested", evidence)


def shares_words(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda item: -item[1]))


def plan(found: Iterable[Hypothesis], device: Clock, roof: float) -> tuple[Hypothesis, ...]:
    """The supported hypotheses that call for a change above the noise, the largest gain first, each change with its gain.

    ``device`` is the clock of the device's time, which the machine's ceiling lets be sped up ``roof`` times at the most.
    Changes of a caller's time come last, as that ceiling does not limit them."""
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
