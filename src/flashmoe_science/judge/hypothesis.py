"""What a hypothesis about a kernel's time is: a cause that the numbers support, rule out, or cannot test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flashmoe_science.judge.ceilings import Level
from flashmoe_science.judge.facts import Facts

Status = Literal["supported", "ruled out", "untested"]
Source = Literal["launch data", "counters", "timings", "spec", "measured ceilings", "refusal"]

BOUND = 0.6  # of a ceiling: from here on it holds the time; Nsight Compute draws its line there too
FREE = 0.3  # below this it does not, even if it was reckoned wrong by half
TENSOR_IDLE = 0.005  # of the cycles: no more than stray instructions
NO_COUNTERS = "to know takes counters"


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """``evidence`` is in words with the numbers in them; ``numbers`` are the same for a program; ``sources`` says whence."""

    key: str
    title: str
    status: Status
    evidence: str
    sources: tuple[Source, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "title": self.title,
            "status": self.status,
            "evidence": self.evidence,
            "sources": list(self.sources),
            "numbers": dict(self.numbers),
        }


def by_share(key: str, title: str, share: float, words: str) -> Hypothesis:
    """Bound by something where counters saw enough of its peak in use."""
    status: Status = "supported" if share >= BOUND else "ruled out"
    return Hypothesis(key, title, status, f"{share:.1%} {words}", ("counters",), {"share": share})


def reckoned(facts: Facts, level: Level) -> tuple[Source, ...]:
    """Sources of a share that was reckoned from a time and a ceiling."""
    ceiling = facts.ceilings.get(level)
    known: tuple[Source, ...] = () if ceiling is None else ("measured ceilings",) if ceiling.measured else ("spec",)
    return ("timings", *known) if facts.launch is None else ("launch data", "timings", *known)
