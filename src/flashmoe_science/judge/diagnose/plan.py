"""The changes that a diagnosis calls for, in the order of what each can give at the most, and what they give together.

Changes of the whole time (more SMs at work) multiply; changes of parts add their savings, the parts taken as disjoint, which is
the most that they can give. No sum gets below the time that the binding ceiling alone takes.

What changes then gave is read off later records: a cause that an earlier source had, and that this one has no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashmoe_science.judge.diagnose.diagnosis import Diagnosis, diagnose
from flashmoe_science.judge.diagnose.facts import Facts, NothingKnown, Time
from flashmoe_science.judge.diagnose.hypothesis import Change
from flashmoe_science.judge.stats import quotient
from flashmoe_science.judge.verdicts import Verdict, verdicts_of
from flashmoe_science.records import Clock, PromiseRow
from flashmoe_science.store import Run

_WORTH_A_STEP = 1.02  # less is within the noise


@dataclass(frozen=True, slots=True)
class Step:
    """One change: it speeds ``part`` of the time up ``speedup`` times and gives ``most_gain`` by itself.

    ``cumulated`` is what it gives with those before it; ``capped`` says that the machine's binding ceiling set that. ``clock``
    tells which time it is a part of: "graph" is the device's, "eager" what a caller waits.
    """

    change: str
    hypothesis: str
    clock: Clock
    part: float
    speedup: float
    most_gain: float
    how: str
    cumulated: float = 1.0
    capped: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """``steps`` of each clock stand with what gives most first. ``least_ns`` is what the binding ceiling alone takes, None
    where no ceiling is known; ``limit`` names it."""

    steps: tuple[Step, ...]
    time_ns: float | None
    least_ns: float | None
    limit: str | None

    def as_dict(self) -> dict[str, Any]:
        steps = [asdict(step) | {"speedup": None if math.isinf(step.speedup) else step.speedup} for step in self.steps]
        return asdict(self) | {"steps": steps}


def plan(diagnosis: Diagnosis) -> Plan:
    """The changes of the supported hypotheses, each with the most that it can give."""
    facts, point = diagnosis.facts, diagnosis.point
    binding = point.binding if point else None
    device: Clock = "eager" if facts.machine == "cpu" or "graph" not in facts.times else "graph"
    roof = 1 / binding.share if binding and binding.share else math.inf
    steps = [_step(one.change, one.key, device, roof) for one in diagnosis.supported if one.change is not None]
    steps.sort(key=lambda step: (step.clock != device, -step.most_gain))
    return Plan(
        steps=tuple(_cumulate([step for step in steps if step.most_gain >= _WORTH_A_STEP], device, roof)),
        time_ns=diagnosis.time_ns,
        least_ns=binding.least_ns if binding else None,
        limit=f"{binding.level}: {binding.ceiling}" if binding else None,
    )


def _step(change: Change, key: str, device: Clock, roof: float) -> Step:
    clock = change.clock or device
    gain = min(change.most_gain, roof) if clock == device else change.most_gain
    return Step(change.what, key, clock, change.bounded_part, change.speedup, gain, change.how)


def _cumulate(steps: list[Step], device: Clock, roof: float) -> list[Step]:
    """Each step with what it and those before it on its clock give together, under the roof of the device's time."""
    done: list[Step] = []
    for step in steps:
        before = [one for one in done if one.clock == step.clock]
        together = _together([*before, step])
        capped = step.clock == device and together > roof
        done.append(replace(step, cumulated=roof if capped else together, capped=capped))
    return done


def _together(steps: list[Step]) -> float:
    whole = math.prod(step.speedup for step in steps if step.part == 1)
    parts = [(step.part, step.speedup) for step in steps if step.part < 1]
    weight = sum(part for part, _ in parts)
    shrink = 1 / weight if weight > 1 else 1.0  # parts that overlap cannot together be more than all of the time
    left = 1 - sum(part * shrink * (1 - 1 / speedup) for part, speedup in parts)
    return math.inf if left <= 0 else whole / left


@dataclass(frozen=True, slots=True)
class Outcome:
    """A change that an earlier diagnosis called for, and whose cause is gone since. ``most_gain`` is what it could give at the
    most by itself; ``gain`` is the time then over the time now, of all that changed between the two runs together, with an
    interval where both timed the kernel beside the same rival. ``how`` says which."""

    hypothesis: str
    change: str
    most_gain: float
    gain: float
    low: float | None
    high: float | None
    before_run: str
    run: str
    how: str


def outcomes(diagnosis: Diagnosis, runs: Sequence[Run]) -> list[Outcome]:
    """What came of the changes that the same kernel's diagnosis called for, by the latest earlier run of other source."""
    facts = diagnosis.facts
    now = facts.times.get("graph") or facts.times.get("eager")
    by_id = {run.header.run: run for run in runs}
    if now is None or now.run not in by_id:
        return []
    latest = by_id[now.run]
    earlier = [
        run for run in runs if run.header.started < latest.header.started and _source(run, facts) != _source(latest, facts)
    ]
    try:
        before = diagnose(earlier, diagnosis.problem, diagnosis.kernel, gpu=facts.machine)
    except NothingKnown:
        return []
    then = before.facts.times.get(now.clock)
    if then is None:
        return []
    gain, low, high, how = then.time_ns / now.time_ns, None, None, "times of two runs, which differ by some 5% by themselves"
    mine, theirs = (_verdict(by_id[one.run], diagnosis, one) for one in (now, then))
    if mine and theirs and mine.interval and theirs.interval and mine.rival == theirs.rival:
        found = quotient(mine.interval, theirs.interval)
        gain, low, high, how = found.ratio, found.low, found.high, f"each beside {mine.rival} in its own run"
    still = {one.key for one in diagnosis.supported}
    return [
        Outcome(step.hypothesis, step.change, step.most_gain, gain, low, high, then.run, now.run, how)
        for step in plan(before).steps
        if step.hypothesis not in still
    ]


def _source(run: Run, facts: Facts) -> str | None:
    """What tells the kernel's source in a run: the package's, or that of a user's own file."""
    own = (row.source_digest for row in run.rows if isinstance(row, PromiseRow) and row.kernel == facts.kernel)
    return next(own, run.header.source_digest)


def _verdict(run: Run, diagnosis: Diagnosis, time: Time) -> Verdict | None:
    """The run's verdict that the time is of."""
    wanted = diagnosis.problem, diagnosis.kernel, time.config, time.clock
    return next((row for row in verdicts_of(run) if (row.problem, row.kernel, row.config, row.clock) == wanted), None)
