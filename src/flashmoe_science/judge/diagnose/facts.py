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
    """A kernel's median time, ns a call, the run that took it, and the rival beside which it was taken, with that one's time;
    None for the kernel itself or a user's."""

    clock: Clock
    time_ns: float
    config: str
    run: str
    rival: str | None
    rival_ns: float


@dataclass(frozen=True, slots=True)
class Facts:
    """None, or empty, is what no record says. ``machine`` is a GPU's short name or "cpu"; ``gpu`` is None where the table
    lacks it; ``counters`` are of ``launch``, the call's longest."""

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
    rival: str | None = None
    rival_ns: Mapping[Clock, float] = field(default_factory=dict)
    ceilings: Mapping[Level, Ceiling] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()

    @property
    def time_ns(self) -> float | None:
        """Device time where a GPU's was taken, else the time of eager calls, else that under the profiler."""
        for clock in ("graph", "eager"):
            if clock in self.times:
                return self.times[clock].time_ns
        return self.counter("time_ns")

    def counter(self, *quantities: str) -> float | None:
        """What Nsight Compute counted of these quantities (hardware/counters.py) together; None where it did not count one."""
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


def gather(runs: Sequence[Run], problem: str, kernel: str, gpu: str | None = None) -> Facts:
    """Everything that runs say of a kernel, in its fastest config, on a problem. Later runs count before earlier ones.

    ``gpu`` is a short name, or "cpu"; by default the machine of the latest run that knows of the two. Raises ProblemError: the
    problem does not parse. Raises NothingKnown: no run times, profiles, launches or refuses the kernel on the problem there."""
    asked = parse_problem(problem)
    problem = str(asked)
    ordered = sorted(runs, key=lambda run: (run.header.started, run.header.run), reverse=True)
    knowing = [run for run in ordered if kernel in _kernels(run, problem)]
    machines = dict.fromkeys(gpu_name(run.header.environment) for run in knowing)
    machine = gpu or next(iter(machines), None)
    if machine is None or machine not in machines:
        known = ", ".join(sorted({name for run in ordered for name in _kernels(run, problem)}))
        told = f"there are such records on {', '.join(machines)}" if machines else f"they know {known or 'none'} there"
        raise NothingKnown(f"no record{f' on {gpu}' if gpu else ''} speaks of kernel {kernel!r} on '{problem}'; {told}")
    here = [run for run in ordered if gpu_name(run.header.environment) == machine]
    own = [time for run in here for time in _times(run, problem, kernel)]
    config = _config(here, own, problem, kernel)
    launch, counters, absent = _seen(here, problem, kernel, config)
    latest = next((time.run for time in own if time.rival), None)  # of the rivals that its run has, the fastest
    rival = min((one for one in own if one.rival and one.run == latest), key=lambda one: one.rival_ns, default=None)
    beside = reversed([one for one in own if rival and one.rival == rival.rival])
    source = next(run for run in knowing if gpu_name(run.header.environment) == machine).header.source_digest
    known_gpu = GPUS.get(machine)
    return Facts(
        problem=asked,
        kernel=kernel,
        config=config,
        machine=machine,
        gpu=known_gpu,
        sm_count=here[0].header.environment.sm_count or (known_gpu.sm_count if known_gpu else None),
        launch=launch,
        counters=counters,
        counters_absent=absent,
        times=_by_clock(own, config),
        rival=rival and rival.rival,
        rival_ns={time.clock: time.rival_ns for time in beside},
        ceilings=ceilings(here, machine, asked.dtype),
        refusals=tuple(
            f"{row.stage}: {row.reason}"
            for run in here
            if run.header.source_digest == source  # what was refused of other source is history
            for row in run.rows
            if isinstance(row, RefusalRow) and (row.problem, row.kernel) == (problem, kernel) and row.config in (config, None)
        ),
    )


def _latest(here: Sequence[Run], kind: type[_Row], problem: str, kernel: str, config: str) -> list[_Row]:
    """The rows of that kind of the latest run that has any of the kernel with the config."""
    for run in here:
        rows = [row for row in run.rows if isinstance(row, kind)]
        if rows := [row for row in rows if (row.problem, row.kernel, row.config) == (problem, kernel, config)]:
            return rows
    return []


def _kernels(run: Run, problem: str) -> set[str]:
    """The kernels that a run knows on a problem."""
    rows = [row for row in run.rows if isinstance(row, TimingRow | ProfileRow | CallPathRow | RefusalRow) and row.kernel]
    return {name for row in rows if row.problem == problem for name in (row.kernel, getattr(row, "rival", None)) if name}


def _times(run: Run, problem: str, kernel: str) -> list[Time]:
    """Medians of every series of a kernel on a problem in a run, from either side of a pair."""
    found = []
    for row in run.rows:
        if isinstance(row, TimingRow) and row.problem == problem and kernel in (row.kernel, row.rival):
            sides = (row.kernel, row.config, row.origin, row.a), (row.rival, row.rival_config, row.rival_origin, row.b)
            for (name, config, _, series), (other, _, origin, others) in (sides, sides[::-1]):
                if name == kernel and series and min(series) > 0:
                    rival = other if other != kernel and others and origin != "candidate" else None
                    medians = [float(statistics.median(times)) for times in (series, others) if times]
                    found.append(Time(row.clock, medians[0], config, row.run, rival, medians[-1]))
    return found


def _config(here: Sequence[Run], own: Sequence[Time], problem: str, kernel: str) -> str:
    """The config with the least device time in the latest run; else the first that was profiled, launched or refused."""
    if own:
        return min((one for one in own if one.run == own[0].run), key=lambda one: (one.clock != "graph", one.time_ns)).config
    rows = [row for run in here for row in run.rows if isinstance(row, ProfileRow | CallPathRow | RefusalRow)]
    return next((row.config for row in rows if (row.problem, row.kernel) == (problem, kernel) and row.config is not None), "")


def _by_clock(own: Sequence[Time], config: str) -> dict[Clock, Time]:
    """On each clock, the least of the latest run's medians: pairs with slow rivals warm a GPU less."""
    found: dict[Clock, Time] = {}
    for time in own:
        before = found.get(time.clock)
        if time.config == config and (before is None or (before.run == time.run and time.time_ns < before.time_ns)):
            found[time.clock] = time
    return found


def _seen(here: Sequence[Run], problem: str, kernel: str, config: str) -> tuple[SeenLaunch | None, Counters | None, str | None]:
    """The launch of the call that matters most, its counters, and why there are none of the kernel that was timed: it may have
    changed since it was profiled, or before."""
    profiles = _latest(here, ProfileRow, problem, kernel, config)
    launches = next((row.launches for row in _latest(here, CallPathRow, problem, kernel, config)), [])
    counted = max((row for row in profiles if row.metrics), key=lambda row: row.time_ns or 0.0, default=None)
    if counted is None:
        counters, absent = None, next((row.absent for row in profiles if row.absent), "it was not profiled")
    elif (one := counted.launch) and launches and all((seen.grid, seen.block) != (one.grid, one.block) for seen in launches):
        what = f"{one.grid} blocks of {one.block} threads"
        counters, absent = None, f"run {counted.run} profiled another launch, {what}; profile it again"
    else:
        counters, absent = Counters(counted.metrics), None
        if counted.launch:
            return counted.launch, counters, None
    # The launch with the most threads: no time of any single one is known. Copies and fills have none.
    every = [one for one in launches or [row.launch for row in profiles if row.launch] if math.prod(one.grid)]
    return max(every, key=lambda one: math.prod((*one.grid, *one.block)), default=None), counters, absent
