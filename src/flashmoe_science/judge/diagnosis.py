"""Why is a kernel not faster? A set of hypotheses, each supported, ruled out or untested, with the numbers it rests on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashmoe_science.judge import hypotheses_launch as launch
from flashmoe_science.judge import hypotheses_memory as memory
from flashmoe_science.judge import hypotheses_pipes as pipes
from flashmoe_science.judge.facts import Facts, NothingKnown, gather
from flashmoe_science.judge.hypothesis import Hypothesis
from flashmoe_science.judge.roofline import Point
from flashmoe_science.store import Run

__all__ = ["Diagnosis", "Hypothesis", "NothingKnown", "diagnose", "diagnosis_of"]

# In the order in which a reader asks: is it the host, is the GPU full, what is busy, what is wasted.
_HYPOTHESES: tuple[Callable[[Facts], Hypothesis | None], ...] = (
    launch.host_bound,
    launch.rival_floor,
    launch.small_grid,
    launch.serial_loop,
    launch.tail_wave,
    launch.idle_threads,
    pipes.no_tensor_cores,
    memory.dram_bound,
    memory.l2_bound,
    pipes.matmul_bound,
    pipes.tensor_bound,
    pipes.fma_bound,
    pipes.special_bound,
    pipes.shared_bound,
    pipes.latency_bound,
    memory.redundant_traffic,
    memory.uncoalesced,
    pipes.bank_conflicts,
    pipes.spills,
    launch.shared_tile,
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the records say of one kernel's time on one problem.

    ``time_ns`` is of the device where there is one; ``point`` is where it stands under the machine's ceilings;
    ``counters_absent`` is why no counter speaks, None where they do.
    """

    facts: Facts
    hypotheses: tuple[Hypothesis, ...]
    point: Point | None

    @property
    def problem(self) -> str:
        return str(self.facts.problem)

    @property
    def kernel(self) -> str:
        return self.facts.kernel

    @property
    def time_ns(self) -> float | None:
        return self.facts.time_ns

    @property
    def counters_absent(self) -> str | None:
        return self.facts.counters_absent

    @property
    def supported(self) -> tuple[Hypothesis, ...]:
        return tuple(one for one in self.hypotheses if one.status == "supported")

    def __getitem__(self, key: str) -> Hypothesis:
        """The hypothesis of that key. Raises KeyError where it has no meaning here."""
        for one in self.hypotheses:
            if one.key == key:
                return one
        raise KeyError(key)

    @property
    def cause(self) -> str:
        """One line: what the numbers support."""
        if self.time_ns is None and self.facts.refusals:
            return f"it was refused: {self.facts.refusals[0]}"
        found = [one.title for one in self.supported if one.key != "rival-floor"]
        if found:
            return "; ".join(found)
        more = self.counters_absent if self.facts.machine != "cpu" else None
        return "no cause is supported" + (f"; counters would tell more ({more})" if more else "")

    def as_dict(self) -> dict[str, Any]:
        return {
            "problem": self.problem,
            "kernel": self.kernel,
            "config": self.facts.config,
            "gpu": self.facts.machine,
            "time_ns": self.time_ns,
            "cause": self.cause,
            "counters_absent": self.counters_absent,
            "refusals": list(self.facts.refusals),
            "hypotheses": [one.as_dict() for one in self.hypotheses],
            "roofline": None if self.point is None else self.point.as_dict(),
        }


def diagnose(
    runs: Run | Sequence[Run], problem: str, kernel: str, config: str | None = None, gpu: str | None = None
) -> Diagnosis:
    """Judge every hypothesis about a kernel on a problem, by all that the runs hold of it.

    Args:
        config: of the kernel; by default its fastest. gpu: short name, or "cpu"; by default where it was seen last.

    Raises:
        ProblemError: the problem does not parse.
        NothingKnown: no record speaks of the kernel on the problem.
    """
    return diagnosis_of(gather([runs] if isinstance(runs, Run) else runs, problem, kernel, config, gpu))


def diagnosis_of(facts: Facts) -> Diagnosis:
    judged = (hypothesis(facts) for hypothesis in _HYPOTHESES)
    return Diagnosis(facts, tuple(one for one in judged if one is not None), facts.point())
