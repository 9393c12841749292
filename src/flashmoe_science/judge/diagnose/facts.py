"""What the records hold of one kernel on one problem: its launches, counters and times, and those of its neighbours."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from flashmoe_science.hardware.counters import Counters
from flashmoe_science.hardware.gpus import GPUS, Gpu
from flashmoe_science.hardware.occupancy import Residency, residency
from flashmoe_science.judge.diagnose.roofline import Ceiling, Level, Point, ceilings, place
from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.records import CallPathRow, Clock, ProfileRow, RefusalRow, SeenLaunch, TimingRow
from flashmoe_science.store import Run

_Row = TypeVar("_Row", CallPathRow, ProfileRow)


class NothingKnown(ValueError):
    """The records hold nothing of a kernel on a problem. One line."""


class Time(NamedTuple):
    """A median time, ns a call, of a kernel on a problem, the run that took it, and the rival beside which it was taken with
    that one's time; None for the kernel itself or a user's."""

    problem: str
    clock: Clock
    time_ns: float
    config: str
    run: str
    rival: str | None = None
    rival_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """None, or empty, is what no record says. ``machine`` is a GPU's short name or "cpu"; ``gpu`` is None where the table
    lacks it; ``counters`` are of ``launch``, the call's longest; ``others`` are the kernel's times on other problems.
    """

    problem: Problem
    kernel: str
    config: str
    machine: str
    gpu: Gpu | None
    sm_count: int | None
    launch: SeenLaunch | None = None
    counters: Counters | None = None
    counters_absent: str | None = None
    times: Mapping[Clock, Time] = field(default_factory=dict)
    others: tuple[Time, ...] = ()
    rival: str | None = None
    rival_times: tuple[Time, ...] = ()  # on this problem and others, both clocks
    ceilings: Mapping[Level, Ceiling] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()

    @property
    def time_ns(self) -> float | None:
        """Device time where a GPU's was taken, else the time of eager calls, else that under the profiler."""
        for clock in ("graph", "eager"):
            if clock in self.times:
                return self.times[clock].time_ns
        return self.counter("time_ns")

    def counter(self, quantity: str) -> float | None:
        """What Nsight Compute counted of a quantity (hardware/counters.py); None where it did not."""
        return None if self.counters is None else self.counters[quantity]

    def counted(self, *quantities: str) -> float | None:
        """The sum of counted quantities; None where one was not counted."""
        return None if self.counters is None else self.counters.total(*quantities)

    def waiting(self, *reasons: str) -> float:
        """Share of the warps' waiting that has one of these stall reasons."""
        stalls = {} if self.counters is None else self.counters.stalls()
        return sum(stalls.get(reason, 0.0) for reason in reasons)

    @property
    def blocks(self) -> int | None:
        return None if self.launch is None else math.prod(self.launch.grid)

    @property
    def threads(self) -> int | None:
        return None if self.launch is None else math.prod(self.launch.block)

    @property
    def rows_per_block(self) -> float | None:
        """Query rows for each block, of an attention whose blocks share the rows out among them."""
        walk = self.problem.walk()
        return walk.rows / self.blocks if walk is not None and self.blocks else None

    def residency(self) -> Residency | None:
        """Blocks resident on an SM, by the launch; None where registers or the GPU's limits are not known."""
        if self.gpu is None or self.launch is None or not self.threads or self.launch.registers is None:
            return None
        return residency(self.gpu, threads=self.threads, registers=self.launch.registers, shared_bytes=self.launch.shared_bytes)

    def point(self) -> Point | None:
        """Where the kernel stands under the ceilings, by what the problem needs at the least."""
        if self.time_ns is None:
            return None
        return place(str(self.problem), self.kernel, self.config, self.time_ns, self.ceilings)

    def share(self, level: Level) -> float | None:
        """Share of a machine's ceiling that the problem's least need reaches."""
        point = self.point()
        need = point.need(level) if point else None
        return None if need is None else need.share

    def asked_of(self, pipe: Level) -> float | None:
        """What the problem's own work asks of a pipe, as a share of what the SMs with a block can do.

        The FLOPs of matrix products are asked of the tensor and of the FMA pipe, though only one of them does each.
        """
        ceiling = self.ceilings.get(pipe)
        if ceiling is None or not self.blocks or not self.sm_count or not self.time_ns:
            return None
        if pipe == "special" and self.problem.exponentials():
            work = self.problem.exponentials()
        elif pipe in ("tensor", "fma") and self.problem.is_products():
            work = self.problem.flops()
        else:
            return None
        return work / self.time_ns * 1e9 / (ceiling.value * min(self.blocks, self.sm_count) / self.sm_count)


def gather(runs: Sequence[Run], problem: str, kernel: str, config: str | None = None, gpu: str | None = None) -> Facts:
    """Everything that runs say of a kernel on a problem. Later runs count before earlier ones.

    Args:
        config: of the kernel; by default the one with the least time, or the one that was profiled.
        gpu: short name, or "cpu"; by default the machine of the latest run that knows of the two.

    Raises:
        ProblemError: the problem does not parse.
        NothingKnown: no run times, profiles, launches or refuses the kernel on the problem there.
    """
    asked = parse_problem(problem)
    problem = str(asked)
    ordered = sorted(runs, key=lambda run: (run.header.started, run.header.run), reverse=True)
    machines = dict.fromkeys(gpu_name(run.header.environment) for run in ordered if kernel in _kernels(run, problem))
    machine = gpu or next(iter(machines), None)
    if machine is None or machine not in machines:
        raise NothingKnown(_nothing(ordered, problem, kernel, gpu, tuple(machines)))
    here = [run for run in ordered if gpu_name(run.header.environment) == machine]
    times = [time for run in here for time in _times(run, kernel)]
    own = [time for time in times if time.problem == problem]
    configs = _configs(here, own, problem, kernel)
    if config is not None and config not in configs:
        known = " or ".join(map(repr, configs)) or "none"
        raise NothingKnown(f"no record on {machine} speaks of config {config!r} of {kernel} on '{problem}'; they know {known}")
    chosen = config if config is not None else configs[0] if configs else ""
    launch, counters, absent = _seen(here, problem, kernel, chosen)
    beside = [time for time in own if time.rival]  # the fastest of the latest run that has any
    rival = min(beside, key=lambda time: (time.run != beside[0].run, time.rival_ns)).rival if beside else None
    known_gpu = GPUS.get(machine)
    return Facts(
        problem=asked,
        kernel=kernel,
        config=chosen,
        machine=machine,
        gpu=known_gpu,
        sm_count=here[0].header.environment.sm_count or (known_gpu.sm_count if known_gpu else None),
        launch=launch,
        counters=counters,
        counters_absent=absent,
        times=_by_clock(own, chosen),
        others=tuple(time for time in times if time.problem != problem),
        rival=rival,
        rival_times=tuple(time for run in here for time in _times(run, rival)) if rival else (),
        ceilings=ceilings(here, machine, known_gpu, asked.dtype),
        refusals=_refusals(here, problem, kernel, chosen),
    )


def _seen(here: Sequence[Run], problem: str, kernel: str, config: str) -> tuple[SeenLaunch | None, Counters | None, str | None]:
    """The launch of the call that matters most, its counters, and why there are none of the kernel that was timed: it may have
    changed since it was profiled, or before."""
    profiles = _latest(here, ProfileRow, problem, kernel, config)
    launches = next((row.launches for row in _latest(here, CallPathRow, problem, kernel, config)), [])
    counted = max((row for row in profiles if row.metrics), key=lambda row: row.time_ns or 0.0, default=None)
    absent = None if counted else next((row.absent for row in profiles if row.absent), "it was not profiled")
    if counted and counted.launch and launches:
        profiled = counted.launch
        if all((one.grid, one.block) != (profiled.grid, profiled.block) for one in launches):
            what = f"{profiled.grid} blocks of {profiled.block} threads"
            absent = f"run {counted.run} profiled another launch, {what}; profile it again"
            counted = None
    if counted and counted.launch:
        return counted.launch, Counters(counted.metrics), None
    # The launch with the most threads: no time of any single one is known. Copies and fills have none.
    every = launches or [row.launch for row in profiles if row.launch]
    largest = max(
        (one for one in every if math.prod(one.grid)), key=lambda one: math.prod((*one.grid, *one.block)), default=None
    )
    return largest, Counters(counted.metrics) if counted else None, absent


def _kernels(run: Run, problem: str) -> set[str]:
    found: set[str] = set()
    for row in run.rows:
        if isinstance(row, TimingRow | ProfileRow | CallPathRow | RefusalRow) and row.problem == problem and row.kernel:
            found.add(row.kernel)
            if isinstance(row, TimingRow):
                found.add(row.rival)
    return found


def _times(run: Run, kernel: str) -> list[Time]:
    """Medians of every series of a kernel in a run, from either side of a pair."""
    found = []
    for row in run.rows:
        if isinstance(row, TimingRow) and kernel in (row.kernel, row.rival):
            sides = (row.kernel, row.config, row.origin, row.a), (row.rival, row.rival_config, row.rival_origin, row.b)
            for (name, config, _, series), (other, _, origin, others) in (sides, sides[::-1]):
                if name == kernel and series and min(series) > 0:
                    rival = other if other != kernel and others and origin != "candidate" else None
                    medians = [float(statistics.median(times)) for times in (series, others) if times]
                    found.append(Time(row.problem, row.clock, medians[0], config, row.run, rival, medians[-1]))
    return found


def _nothing(runs: Sequence[Run], problem: str, kernel: str, gpu: str | None, machines: Sequence[str]) -> str:
    """That nothing is known, and what is: the machines that know the kernel there, else the kernels that are known there."""
    said = f"no record{f' on {gpu}' if gpu else ''} speaks of kernel {kernel!r} on '{problem}'"
    if machines:
        return f"{said}; there are such records on {', '.join(machines)}"
    here = [run for run in runs if gpu in (None, gpu_name(run.header.environment))]
    known = sorted({name for run in here for name in _kernels(run, problem)})
    return f"{said}; they know {', '.join(known)} there" if known else f"{said}, or of any other kernel on it"


def _configs(here: Sequence[Run], own: Sequence[Time], problem: str, kernel: str) -> list[str]:
    """The configs on record: that with the least device time in the latest run, then those profiled, launched or refused."""
    latest = own[0].run if own else None
    timed = sorted((time for time in own if time.run == latest), key=lambda time: (time.clock != "graph", time.time_ns))
    rows = [row for run in here for row in run.rows if isinstance(row, ProfileRow | CallPathRow | RefusalRow)]
    named = [row.config for row in rows if row.problem == problem and row.kernel == kernel and row.config is not None]
    return list(dict.fromkeys([*(time.config for time in timed), *(time.config for time in own), *named]))


def _by_clock(own: Sequence[Time], config: str) -> dict[Clock, Time]:
    """On each clock, the least of the latest run's medians: pairs with slow rivals warm a GPU less."""
    found: dict[Clock, Time] = {}
    for time in own:
        if time.config == config:
            before = found.get(time.clock)
            if before is None or (before.run == time.run and time.time_ns < before.time_ns):
                found[time.clock] = time
    return found


def _latest(here: Sequence[Run], kind: type[_Row], problem: str, kernel: str, config: str) -> list[_Row]:
    """The rows of that kind of the latest run that has any of the kernel so."""
    for run in here:
        rows = [row for row in run.rows if isinstance(row, kind)]
        rows = [row for row in rows if (row.problem, row.kernel, row.config) == (problem, kernel, config)]
        if rows:
            return rows
    return []


def _refusals(here: Sequence[Run], problem: str, kernel: str, config: str) -> tuple[str, ...]:
    """What was refused of it by the latest run that knows it, and by others of the same source."""
    latest = next(run for run in here if kernel in _kernels(run, problem))
    same = [run for run in here if run.header.source_digest == latest.header.source_digest]
    rows = [row for run in same for row in run.rows if isinstance(row, RefusalRow) and row.config in (config, None)]
    return tuple(f"{row.stage}: {row.reason}" for row in rows if (row.problem, row.kernel) == (problem, kernel))
