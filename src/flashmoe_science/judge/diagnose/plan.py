"""The changes that a diagnosis calls for, in the order of what each can give at the most, and what they give together.

Changes of the whole time (more SMs at work) multiply; changes of parts add their savings, the parts taken as disjoint, which is
the most that they can give. No sum gets below the time that the binding ceiling alone takes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashmoe_science.judge.diagnose.diagnosis import Diagnosis
from flashmoe_science.judge.diagnose.hypothesis import Change
from flashmoe_science.records import Clock

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
