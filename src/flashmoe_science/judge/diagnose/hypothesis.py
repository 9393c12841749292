"""A hypothesis about a kernel's time: a cause that the numbers support, rule out or cannot test, and the change for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flashmoe_science.records import Clock

Status = Literal["supported", "ruled out", "untested"]

BOUND = 0.6  # of a ceiling: from here on the time is bound by it; Nsight Compute draws its line there too
FREE = 0.3  # of a ceiling: below this the time is not bound by it, even if the estimate is off by half
TENSOR_IDLE = 0.005  # of the cycles: no more than stray instructions
_MOST_OF_A_TIME = 0.99  # that a change can take away altogether: something is always left


def amdahl(part: float, speedup: float) -> float:
    """The speed-up of a whole of which ``part`` (0 to 1) is sped up ``speedup`` times, which may be infinite."""
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
    """``evidence`` is a sentence with the numbers that decide in it. ``change`` is what a supported one calls for, None where
    its gain cannot be told."""

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
