"""Who takes part in a round's timing: candidates that run, then candidates on a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_science.kernel import Kernel
from flashmoe_science.measure.bench import Call, Candidate
from flashmoe_science.measure.timing import Sampler


@dataclass(frozen=True, slots=True)
class Entrant:
    """A candidate that runs: planned for this problem's inputs, and as a user would call it."""

    candidate: Candidate
    call: Call
    user_call: Call


@dataclass(frozen=True, slots=True)
class Timed:
    """An entrant on a clock, with the median of its quick bench in nanoseconds a call."""

    entrant: Entrant
    sampler: Sampler
    quick_ns: float

    @property
    def candidate(self) -> Candidate:
        return self.entrant.candidate


def fastest_of_each(timed: Sequence[Timed], kernels: Sequence[Kernel]) -> list[Timed]:
    """The fastest config of each kernel, the fastest kernel first."""
    names = {kernel.name for kernel in kernels}
    best: dict[str, Timed] = {}
    for one in sorted(timed, key=lambda one: one.quick_ns):
        if one.candidate.name in names:
            best.setdefault(one.candidate.name, one)
    return list(best.values())
