"""A hypothesis about a kernel's time: a cause that the numbers support, rule out or cannot test, and the change for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flashmoe_science.judge.diagnose.ceilings import Level
from flashmoe_science.judge.diagnose.facts import Facts
from flashmoe_science.records import Clock

Status = Literal["supported", "ruled out", "untested"]
Source = Literal["launch data", "counters", "timings", "spec", "measured ceilings", "refusal"]

BOUND = 0.6  # of a ceiling: from here on the time is bound by it; Nsight Compute draws its line there too
FREE = 0.3  # of a ceiling: below this the time is not bound by it, even if the estimate is off by half
TENSOR_IDLE = 0.005  # of the cycles: no more than stray instructions
NO_COUNTERS = "to know takes counters"
_MOST_OF_A_TIME = 0.99  # that a change can take away altogether: something is always left


def amdahl(part: float, speedup: float) -> float:
    """The speed-up of a whole of which ``part`` (0 to 1) is sped up ``speedup`` times, which may be infinite.

    Raises:
        ValueError: a part outside 0 to 1, a speed-up that is not above 0.
    """
    if not 0 <= part <= 1:
        raise ValueError(f"part is {part:g}; it must be from 0 to 1")
    if not speedup > 0:
        raise ValueError(f"speedup is {speedup:g}; it must be above 0")
    left = (1 - part) + part / speedup
    return math.inf if left == 0 else 1 / left


@dataclass(frozen=True, slots=True)
class Change:
    """A change that speeds ``part`` of a time (0 to 1) up ``speedup`` times, which is infinite where the part would go.

    ``clock`` is the time that it is a part of: "eager" what a caller waits, None the device's. ``how`` says where the two
    numbers come from.
    """

    what: str
    part: float
    speedup: float
    how: str
    clock: Clock | None = None

    @property
    def most_gain(self) -> float:
        """The most that the change can give by itself (Amdahl's law)."""
        return amdahl(self.bounded_part, self.speedup)

    @property
    def bounded_part(self) -> float:
        return min(self.part, _MOST_OF_A_TIME if math.isinf(self.speedup) else 1.0)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """``evidence`` is a sentence with the numbers in it; ``numbers`` are the same for a program; ``sources`` are the kinds of
    records that they come from. ``change`` is what a supported one calls for, None where its gain cannot be told."""

    status: Status
    evidence: str
    sources: tuple[Source, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    change: Change | None = None
    key: str = ""
    title: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "title": self.title,
            "status": self.status,
            "evidence": self.evidence,
            "sources": list(self.sources),
            "numbers": dict(self.numbers),
        }


def untested(evidence: str) -> Hypothesis:
    return Hypothesis("untested", evidence)


def by_share(share: float, words: str) -> Hypothesis:
    """Bound by a unit where counters saw at least BOUND of its peak in use."""
    status: Status = "supported" if share >= BOUND else "ruled out"
    return Hypothesis(status, f"{share:.1%} {words}", ("counters",), {"share": share})


def estimate_sources(facts: Facts, level: Level) -> tuple[Source, ...]:
    """Sources of a share that was computed from a time and a ceiling."""
    ceiling = facts.ceilings.get(level)
    known: tuple[Source, ...] = () if ceiling is None else ("measured ceilings",) if ceiling.measured else ("spec",)
    return ("timings", *known) if facts.launch is None else ("launch data", "timings", *known)
