"""From a diagnosis, changes in the order of what each can give at the most, and what they give together: Amdahl's law.

A change speeds a part ``p`` of the time up ``s`` times, so that it gives 1 / ((1 - p) + p / s) and never more than 1 / (1 - p).
Steps that act on the whole time (more SMs at work) multiply; steps that act on parts add their savings, the parts taken as
disjoint, which is the most that they can give. No sum gets below the time that the binding ceiling alone takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flashmoe_science.judge.diagnosis import Diagnosis
from flashmoe_science.judge.hypothesis import Hypothesis
from flashmoe_science.records import Clock

_MOST_OF_A_TIME = 0.99  # that can be taken away altogether: something is always left
_LEAST_ROWS = 16  # of a tile of a matrix product
_WORTH_A_STEP = 1.02  # less is within the noise


def amdahl(part: float, speedup: float) -> float:
    """What speeding ``part`` (0 to 1) of a time up ``speedup`` times gives. ``speedup`` may be infinite.

    Raises:
        ValueError: a part outside 0 to 1, a speed-up that is not above 0.
    """
    if not 0 <= part <= 1:
        raise ValueError(f"part is {part:g}; it must be from 0 to 1")
    if not speedup > 0:
        raise ValueError(f"speedup is {speedup:g}; it must be above 0")
    left = (1 - part) + part / speedup
    return math.inf if left == 0 else 1 / left


def part_shown(gain: float, speedup: float) -> float | None:
    """The part of the time that must have been sped up ``speedup`` times (it may be infinite) for the whole to gain ``gain``.

    None where not even all of it would do.
    """
    return None if gain > speedup else (1 - 1 / gain) / (1 - 1 / speedup)


@dataclass(frozen=True, slots=True)
class Step:
    """One change: it speeds ``part`` of the time up ``speedup`` times and gives ``most_gain`` by itself.

    ``cumulated`` is what it gives with those before it; ``capped`` says that the machine's binding ceiling set that. ``clock``
    tells which time it is a part of: "graph" is the device's, "eager" what a caller waits. ``how`` says where the two numbers
    come from.
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

    def as_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["speedup"] = None if math.isinf(self.speedup) else self.speedup
        return values


@dataclass(frozen=True, slots=True)
class Plan:
    """``steps`` of each clock stand with what gives most first. ``least_ns`` is what the binding ceiling alone takes, None
    where no ceiling is known; ``limit`` names it."""

    problem: str
    kernel: str
    config: str
    machine: str
    steps: tuple[Step, ...]
    time_ns: float | None
    least_ns: float | None
    limit: str | None

    def as_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {"steps": [step.as_dict() for step in self.steps]}


def plan(diagnosis: Diagnosis) -> Plan:
    """The changes that the supported hypotheses call for, each with the most that it can give."""
    facts, point = diagnosis.facts, diagnosis.point
    binding = point.binding if point else None
    device: Clock = "eager" if facts.machine == "cpu" or "graph" not in facts.times else "graph"
    roof = 1 / binding.share if binding and binding.share else math.inf
    steps = []
    for one in diagnosis.supported:
        made = _STEPS[one.key](one, diagnosis, device) if one.key in _STEPS else None
        if made is not None and made.most_gain >= _WORTH_A_STEP:
            steps.append(replace(made, most_gain=min(made.most_gain, roof)) if made.clock == device else made)
    steps.sort(key=lambda step: (step.clock != device, -step.most_gain))
    return Plan(
        problem=diagnosis.problem,
        kernel=diagnosis.kernel,
        config=facts.config,
        machine=facts.machine,
        steps=tuple(_cumulate(steps, device, roof)),
        time_ns=diagnosis.time_ns,
        least_ns=binding.least_ns if binding else None,
        limit=f"{binding.level}: {binding.ceiling}" if binding else None,
    )


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


Maker = Callable[[Hypothesis, Diagnosis, Clock], Step | None]


def _step(change: str, one: Hypothesis, clock: Clock, part: float, speedup: float, how: str) -> Step:
    part = min(part, _MOST_OF_A_TIME if math.isinf(speedup) else 1.0)
    return Step(change, one.key, clock, part, speedup, amdahl(part, speedup), how)


def _hide_the_host(one: Hypothesis, diagnosis: Diagnosis, device: Clock) -> Step | None:
    ratio = one.numbers.get("eager_over_graph")
    if ratio is None:
        return None
    how = f"all but the device's time goes: {1 - 1 / ratio:.0%} of a call"
    return _step("launch from a CUDA graph, or shorten the path to the launch", one, "eager", 1 - 1 / ratio, math.inf, how)


def _row_parts(diagnosis: Diagnosis) -> float:
    """Into how many blocks the rows of one can go, until every SM has one or a block has the rows of a tensor core's tile (one
    row, where it uses none)."""
    facts, rows = diagnosis.facts, diagnosis.facts.rows_per_block
    if not facts.blocks or not facts.sm_count:
        return 1
    room = facts.sm_count / facts.blocks
    least = 1 if diagnosis["no-tensor-cores"].status == "supported" else _LEAST_ROWS
    return room if rows is None else max(1, min(room // 1, rows // least))


def _fill_the_grid(one: Hypothesis, diagnosis: Diagnosis, device: Clock) -> Step | None:
    parts = _row_parts(diagnosis)
    how = f"{one.numbers['blocks']:.0f} blocks on {one.numbers['sms']:.0f} SMs, each in {parts:.3g} parts"
    return _step("smaller tiles: the rows of a block over more blocks", one, device, 1.0, parts, how)


def _split_the_keys(one: Hypothesis, diagnosis: Diagnosis, device: Clock) -> Step | None:
    """Into the SMs that are still idle once the rows have been spread, or they would be filled twice."""
    spread = one.numbers["blocks"] * _row_parts(diagnosis)
    parts = min(one.numbers["sms"] // spread, one.numbers["parts"])
    how = f"{spread:.0f} blocks, their rows spread, walk 1/{parts:.0f} of the keys each; combining the parts is not counted"
    return _step("split the keys over blocks, then combine the parts", one, device, 1.0, max(parts, 1.0), how)


def _even_out_the_tail(one: Hypothesis, diagnosis: Diagnosis, device: Clock) -> Step | None:
    efficiency = one.numbers["efficiency"]
    how = f"{efficiency:.0%} of the rounds' time is in use"
    return _step("a tile or a persistent grid that leaves no tail", one, device, 1.0, 1 / efficiency, how)


def _use_all_threads(one: Hypothesis, diagnosis: Diagnosis, device: Clock) -> Step | None:
    share = one.numbers["active_share"]
    return _step("give every thread work", one, device, 1.0, 1 / share, f"{share:.0%} of the threads work")


def _use_tensor_cores(one: Hypothesis, diagnosis: Diagnosis, device: Clock) -> Step | None:
    """The products cannot have more of the time than what is left when everything else issues without a pause."""
    tensor, fma = (diagnosis.facts.ceilings.get(level) for level in ("tensor", "fma"))
    share = one.numbers.get("fma_share")
    issued = None if diagnosis.facts.counters is None else diagnosis.facts.counters["issue"]
    if tensor is None or fma is None or share is None or issued is None:
        return None
    others, faster = max(0.0, issued - share), tensor.value / fma.value
    how = f"other instructions issue in {others:.0%} of the cycles; the tensor cores are {faster:.1f} times the FMA pipe"
    return _step("do the matrix products on the tensor cores", one, device, 1 - others, faster, how)


def _remove_conflicts(one: Hypothesis, diagnosis: Diagnosis, device: Clock) -> Step | None:
    wasted = min(one.numbers["conflict_share"], 0.97)  # 31 of 32 wavefronts are the most that can be conflicts
    part = max(one.numbers.get("pipe_share", 0.0), _waiting(diagnosis, "short_scoreboard", "mio_throttle"))
    how = f"shared memory is in use or waited for {part:.0%} of the time; {wasted:.0%} of its wavefronts are conflicts"
    return _step("swizzle or pad shared memory against bank conflicts", one, device, part, 1 / (1 - wasted), how)


def _stop_spilling(one: Hypothesis, diagnosis: Diagnosis, device: Clock) -> Step | None:
    part = max(one.numbers.get("instruction_share", 0.0), _waiting(diagnosis, "long_scoreboard", "lg_throttle"))
    how = f"spills are, or wait with other loads for, at most {part:.0%} of the time"
    return _step("keep registers from spilling: a smaller tile, or more warps", one, device, part, math.inf, how)


def _coalesce(one: Hypothesis, diagnosis: Diagnosis, device: Clock) -> Step | None:
    used, counters = one.numbers["bytes_per_sector"], diagnosis.facts.counters
    busy = 0.0 if counters is None else max(counters["l2"] or 0.0, counters["dram"] or 0.0)
    part = max(busy, _waiting(diagnosis, "long_scoreboard", "lg_throttle"))
    how = f"memory is in use or waited for {part:.0%} of the time; {used:.0f} of each 32 bytes are used"
    return _step("load 16 bytes a thread, neighbours side by side", one, device, part, 32 / max(used, 1.0), how)


def _move_less(one: Hypothesis, diagnosis: Diagnosis, device: Clock) -> Step | None:
    part = max(one.numbers.get("dram_share", 0.0), _waiting(diagnosis, "long_scoreboard", "lg_throttle"))
    ratio = one.numbers["dram_ratio"]
    how = f"memory is in use or waited for {part:.0%} of the time; {ratio:.1f} times what must move crosses DRAM"
    return _step("read what is shared once: order blocks for the L2, larger tiles", one, device, part, ratio, how)


def _waiting(diagnosis: Diagnosis, *reasons: str) -> float:
    """Share of the warps' waiting that has one of these reasons."""
    counters = diagnosis.facts.counters
    stalls = {} if counters is None else counters.stalls()
    return sum(stalls.get(reason, 0.0) for reason in reasons)


def _hide_latency(one: Hypothesis, diagnosis: Diagnosis, device: Clock) -> Step | None:
    """More warps or loads in flight give at the most what it takes to make the busiest unit busy."""
    shares = [value for name, value in one.numbers.items() if name.endswith("share")]
    busiest = max(shares, default=0.0)
    if not 0 < busiest < 1:
        return None
    how = f"the busiest unit is {busiest:.0%} in use; waiting is the rest"
    on_cpu = diagnosis.facts.machine == "cpu"
    change = "vectorise, and block for the caches" if on_cpu else "more work in flight: deeper pipelining, more warps"
    return _step(change, one, device, 1.0, 1 / busiest, how)


_STEPS: dict[str, Maker] = {
    "host-bound": _hide_the_host,
    "small-grid": _fill_the_grid,
    "serial-loop": _split_the_keys,
    "tail-wave": _even_out_the_tail,
    "idle-threads": _use_all_threads,
    "no-tensor-cores": _use_tensor_cores,
    "bank-conflicts": _remove_conflicts,
    "spills": _stop_spilling,
    "uncoalesced": _coalesce,
    "redundant-traffic": _move_less,
    "latency-bound": _hide_latency,
}
