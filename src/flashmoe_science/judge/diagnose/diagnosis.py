"""Why a kernel is not faster: hypotheses, each supported, ruled out or untested, the changes that they call for, and what the
kernel gained since an earlier version by changes whose causes are gone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from flashmoe_science.judge.diagnose import causes_launch as launch
from flashmoe_science.judge.diagnose import causes_units as units
from flashmoe_science.judge.diagnose.facts import Facts, NoRecord, Time, gather
from flashmoe_science.judge.diagnose.hypothesis import Hypothesis, plan
from flashmoe_science.judge.diagnose.roofline import Point
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.judge.stats import quotient
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import Clock, PromiseRow
from flashmoe_science.store import Run

_Test = Callable[[Facts], Hypothesis | None]

# (key, title, test), in the order of the questions: is it the host, is the GPU full, which unit is busy, what is wasted.
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
class Gained:
    """The gain by ``changes`` that an earlier diagnosis called for and whose causes are gone now.

    ``ratio`` is the time then over the time now, by everything that changed between the two runs; its interval is None unless
    both runs timed the kernel beside the same rival. ``how`` says how the times were compared."""

    changes: tuple[Hypothesis, ...]
    ratio: float
    low: float | None
    high: float | None
    before_run: str
    run: str
    how: str

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "changes": [one.key for one in self.changes]}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The causes of one kernel's time on one problem, by the records.

    ``point`` is the kernel's place under the machine's ceilings, None without a time. ``plan`` holds the hypotheses that call
    for a change, by the most that each can give, the greatest first.
    """

    facts: Facts
    hypotheses: tuple[Hypothesis, ...]
    point: Point | None
    plan: tuple[Hypothesis, ...]

    @property
    def cause(self) -> str:
        """The supported causes in one line."""
        if self.facts.time_ns is None and self.facts.refusals:
            return f"it was refused: {self.facts.refusals[0]}"
        found = [one.title for one in self.hypotheses if one.status == "supported" and one.key != "rival-floor"]
        if found:
            return "; ".join(found)
        more = self.facts.counters_absent if self.facts.machine != "cpu" else None
        return "no cause is supported" + (f"; counters would tell more ({more})" if more else "")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite speed-up, of a part that a change removes, is None."""
        changes = [{"hypothesis": one.key, **asdict(one.change)} for one in self.plan if one.change is not None]
        return {
            "problem": str(self.facts.problem),
            "kernel": self.facts.kernel,
            "config": self.facts.config,
            "gpu": self.facts.machine,
            "time_ns": self.facts.time_ns,
            "cause": self.cause,
            "counters_absent": self.facts.counters_absent,
            "refusals": list(self.facts.refusals),
            "hypotheses": [one.as_dict() for one in self.hypotheses],
            "roofline": None if self.point is None else self.point.as_dict(),
            "plan": [one | {"speedup": None if math.isinf(one["speedup"]) else one["speedup"]} for one in changes],
        }


def diagnose(runs: Sequence[Run], problem: str, kernel: str, gpu: str | None = None) -> Diagnosis:
    """The tested hypotheses about a kernel on a problem, by all its records. Raises what ``gather`` raises."""
    facts = gather(runs, problem, kernel, gpu)
    tested = tuple(
        replace(found, key=key, title=title.format(rival=facts.rival))
        for key, title, test in (_OF_CPUS if facts.machine == "cpu" else _OF_GPUS)
        if (found := test(facts)) is not None
    )
    point = facts.point()
    binding = point.binding if point else None
    device: Clock = "eager" if facts.machine == "cpu" or "graph" not in facts.times else "graph"
    return Diagnosis(facts, tested, point, plan(tested, device, 1 / binding.share if binding and binding.share else math.inf))


def gained(diagnosis: Diagnosis, runs: Sequence[Run]) -> Gained | None:
    """The gain by changes that the kernel's diagnosis called for as of the runs of other source before the current one; None
    where all causes remain or there is no such run."""
    facts = diagnosis.facts
    now = facts.times.get("graph") or facts.times.get("eager")
    by_id = {run.header.run: run for run in runs}
    if now is None or now.run not in by_id:
        return None
    latest = by_id[now.run]
    earlier = [
        one for one in runs if one.header.started < latest.header.started and _source(one, facts) != _source(latest, facts)
    ]
    try:
        before = diagnose(earlier, str(facts.problem), facts.kernel, facts.machine)
    except NoRecord:
        return None
    still = {one.key for one in diagnosis.hypotheses if one.status == "supported"}
    changes = tuple(one for one in before.plan if one.key not in still)
    then = before.facts.times.get(now.clock)
    if then is None or not changes:
        return None
    after, first = (_verdict(by_id[one.run], facts, one) for one in (now, then))
    if after and first and after.interval and first.interval and after.rival == first.rival:
        found = quotient(after.interval, first.interval)
        return Gained(
            changes, found.ratio, found.low, found.high, then.run, now.run, f"each beside {after.rival} in its own run"
        )
    how = "times of two runs, which vary by some 5% without a change"
    return Gained(changes, then.time_ns / now.time_ns, None, None, then.run, now.run, how)


def _source(run: Run, facts: Facts) -> str | None:
    """The digest of the kernel's source in a run: the package's, or that of a user's own file."""
    own = (row.source_digest for row in run.of(PromiseRow) if row.kernel == facts.kernel)
    return next(own, run.header.source_digest)


def _verdict(run: Run, facts: Facts, time: Time) -> Verdict | None:
    """The run's verdict with that time."""
    wanted = str(facts.problem), facts.kernel, time.config, time.clock
    return next((row for row in JudgedRun(run).verdicts if (row.problem, row.kernel, row.config, row.clock) == wanted), None)
