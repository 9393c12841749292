"""The hypotheses about why a kernel is not faster, each supported, ruled out or untested, with the numbers it rests on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flashmoe_science.judge.diagnose import causes_launch as launch
from flashmoe_science.judge.diagnose import causes_units as units
from flashmoe_science.judge.diagnose.facts import Facts, gather
from flashmoe_science.judge.diagnose.hypothesis import Hypothesis
from flashmoe_science.judge.diagnose.roofline import Point
from flashmoe_science.store import Run

_Test = Callable[[Facts], Hypothesis | None]

# (key, title, test), in the order in which a reader asks: is it the host, is the GPU full, what is busy, what is wasted.
_OF_GPUS: tuple[tuple[str, str, _Test], ...] = (
    ("host-bound", "launch or host bound: eager calls wait for the host", launch.host_bound),
    ("rival-floor", "as eager calls, its rival {rival} waits for the host", launch.rival_floor),
    ("small-grid", "the grid is smaller than the GPU", launch.small_grid),
    ("serial-loop", "a serial loop over the keys that could be split over blocks", launch.serial_loop),
    ("idle-threads", "threads that do no work", launch.idle_threads),
    ("no-tensor-cores", "its matrix products do not use the tensor cores", units.no_tensor_cores),
    ("dram-bound", "memory bound: DRAM", units.dram_bound),
    ("l2-bound", "memory bound: L2", units.l2_bound),
    ("tensor-bound", "compute bound: tensor pipe", partial(units.pipe_bound, level="tensor")),
    ("fma-bound", "compute bound: FMA pipe", partial(units.pipe_bound, level="fma")),
    ("special-bound", "compute bound: special-function pipe (exp2)", partial(units.pipe_bound, level="special")),
    ("shared-bound", "bound by the shared-memory pipe", partial(units.pipe_bound, level="shared")),
    ("latency-bound", "latency bound: neither memory nor a pipe is busy", units.latency_bound),
    ("uncoalesced", "uncoalesced loads from memory", units.uncoalesced),
    ("bank-conflicts", "shared-memory bank conflicts", units.bank_conflicts),
    ("spills", "registers spilled to memory", units.spills),
    ("shared-tile", "its tile does not fit shared memory", launch.shared_tile),
)
_OF_CPUS: tuple[tuple[str, str, _Test], ...] = (
    ("dram-bound", "memory bound: DRAM", units.dram_bound),
    ("matmul-bound", "compute bound: matrix products", units.matmul_bound),
    ("latency-bound", "latency bound: neither memory nor a pipe is busy", units.latency_bound),
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the records say of one kernel's time on one problem.

    ``point`` is where the kernel stands under the machine's ceilings, None without a time.
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
        """Of the device, where that is known."""
        return self.facts.time_ns

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
        """The supported causes in one line."""
        if self.time_ns is None and self.facts.refusals:
            return f"it was refused: {self.facts.refusals[0]}"
        found = [one.title for one in self.supported if one.key != "rival-floor"]
        if found:
            return "; ".join(found)
        more = self.facts.counters_absent if self.facts.machine != "cpu" else None
        return "no cause is supported" + (f"; counters would tell more ({more})" if more else "")

    def as_dict(self) -> dict[str, Any]:
        return {
            "problem": self.problem,
            "kernel": self.kernel,
            "config": self.facts.config,
            "gpu": self.facts.machine,
            "time_ns": self.time_ns,
            "cause": self.cause,
            "counters_absent": self.facts.counters_absent,
            "refusals": list(self.facts.refusals),
            "hypotheses": [one.as_dict() for one in self.hypotheses],
            "roofline": None if self.point is None else self.point.as_dict(),
        }


def diagnose(
    runs: Run | Sequence[Run], problem: str, kernel: str, config: str | None = None, gpu: str | None = None
) -> Diagnosis:
    """Test every hypothesis about a kernel on a problem by all that the runs hold of it.

    Args:
        config: of the kernel; by default its fastest. gpu: short name, or "cpu"; by default where it was seen last.

    Raises:
        ProblemError: the problem does not parse.
        NothingKnown: no record speaks of the kernel on the problem.
    """
    facts = gather([runs] if isinstance(runs, Run) else runs, problem, kernel, config, gpu)
    tested = [
        replace(found, key=key, title=title.format(rival=facts.rival))
        for key, title, test in (_OF_CPUS if facts.machine == "cpu" else _OF_GPUS)
        if (found := test(facts)) is not None
    ]
    return Diagnosis(facts, tuple(tested), facts.point())
