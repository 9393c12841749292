"""The recorded facts about one kernel on one problem: its launches, counters and times, and its rival's times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flashmoe_science.hardware.counters import Counters
from flashmoe_science.hardware.gpus import GPUS, Gpu
from flashmoe_science.hardware.occupancy import Residency, residency
from flashmoe_science.judge.diagnose.roofline import Ceiling, Level, Point, ceilings, place
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.records import CallPathRow, Clock, ProfileRow, RefusalRow, SeenLaunch, TimingRow
from flashmoe_science.store import Run

_KernelRow = TimingRow | ProfileRow | CallPathRow | RefusalRow


class NoRecord(ValueError):
    """There is no record of this kernel on this problem. One line."""


class Time(NamedTuple):
    """A kernel's median time, ns a call, in one run, and the rival that it was paired with, with the rival's time. ``rival`` is
    None where that is the kernel itself or a user's kernel."""

    clock: Clock
    time_ns: float
    config: str
    run: str
    rival: str | None
    rival_ns: float


@dataclass(frozen=True, slots=True)
class Facts:
    """What the records say, None or empty where they do not. ``machine`` is a GPU's short name or "cpu"; ``gpu`` is None for
    one that the table lacks; ``counters`` are of ``launch``, the longest launch of a call."""

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
        """Device time where it was measured, else the time of eager calls, else that under the profiler."""
        for clock in ("graph", "eager"):
            if clock in self.times:
                return self.times[clock].time_ns
        return self.counter("time_ns")

    def counter(self, *quantities: str) -> float | None:
        """The sum of these Nsight Compute counters (hardware/counters.py); None where one is missing."""
        return None if self.counters is None else self.counters.total(*quantities)

    def waiting(self, *reasons: str) -> float:
        """Share of the warps' stalls that have one of these reasons."""
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
        """Query rows of one block, where the problem is an attention, whose blocks divide the rows among them."""
        walk = self.problem.walk()
        return walk.rows / self.blocks if walk is not None and self.blocks else None

    def residency(self) -> Residency | None:
        """Blocks resident on an SM, by the launch; None where registers or the GPU's limits are unknown."""
        if self.gpu is None or self.launch is None or not self.threads or self.launch.registers is None:
            return None
        return residency(self.gpu, threads=self.threads, registers=self.launch.registers, shared_bytes=self.launch.shared_bytes)

    def point(self) -> Point | None:
        """The kernel's place under the ceilings, by the least work and traffic that the problem needs."""
        if self.time_ns is None:
            return None
        return place(str(self.problem), self.kernel, self.config, self.time_ns, self.ceilings)

    def share(self, level: Level) -> float | None:
        """The problem's least need over the measured time, as a share of a ceiling of the machine."""
        point = self.point()
        need = point.need(level) if point else None
        return None if need is None else need.share

    def pipe_share(self, pipe: Level) -> float | None:
        """The share of a pipe's peak, on the SMs that have a block, that the problem's own work needs.

        FLOPs of matrix products are counted in full for the tensor pipe and for the FMA pipe, though one of them does each.
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
    """The recorded facts about a kernel, in its fastest config, on a problem. Later runs count before earlier ones.

    ``gpu`` is a short name, or "cpu"; by default the machine of the latest run with the kernel on the problem. Raises
    ProblemError: the problem does not parse. Raises NoRecord: no run there times, profiles, launches or refuses the kernel on
    the problem."""
    asked = parse_problem(problem)
    problem = str(asked)
    ordered = sorted(runs, key=lambda run: run.age, reverse=True)
    machines = dict.fromkeys(gpu_name(run.header.environment) for run in ordered if _about(run, problem, kernel))
    machine = gpu or next(iter(machines), None)
    if machine is None or machine not in machines:
        others = {row.kernel for run in ordered for row in run.rows if isinstance(row, _KernelRow) and row.problem == problem}
        elsewhere = f"kernels on record there: {', '.join(sorted(filter(None, others))) or 'none'}"
        if machines:
            elsewhere = f"there are records of both on {', '.join(machines)}"
        raise NoRecord(f"no record{f' on {gpu}' if gpu else ''} has kernel {kernel!r} on '{problem}'; {elsewhere}")
    there = [run for run in ordered if gpu_name(run.header.environment) == machine]
    here = [(run.header, rows) for run in there if (rows := _about(run, problem, kernel))]
    header, every = here[0][0], [row for _, rows in here for row in rows]
    own = _times(every, kernel)
    config = _config(own, [row for row in every if row.kernel == kernel])
    launch, counters, absent = _seen(every, config)
    latest = next((time.run for time in own if time.rival), None)  # the rival is the fastest in this run
    timed = [one for one in own if one.rival and one.run == latest]
    rival = min(timed, key=lambda one: one.rival_ns).rival if timed else None
    rival_times = [time for run in there for time in _times(_about(run, problem, rival), rival)] if rival else []
    # Refusals of other source say nothing of this one.
    same = [row for other, rows in here for row in rows if other.source_digest == header.source_digest]
    listed = GPUS.get(machine)
    return Facts(
        problem=asked,
        kernel=kernel,
        config=config,
        machine=machine,
        gpu=listed,
        sm_count=header.environment.sm_count or (listed.sm_count if listed else None),
        launch=launch,
        counters=counters,
        counters_absent=absent,
        times=_by_clock(own, config),
        rival=rival,
        rival_ns={time.clock: time.time_ns for time in reversed(rival_times)},  # the latest run's
        ceilings=ceilings(runs, machine, asked.dtype),
        refusals=tuple(
            f"{row.stage}: {row.reason}" for row in same if isinstance(row, RefusalRow) and row.config in (config, None)
        ),
    )


def _about(run: Run, problem: str, kernel: str) -> list[_KernelRow]:
    """A run's rows about a kernel on a problem."""
    rows = [row for row in run.rows if isinstance(row, _KernelRow) and row.problem == problem]
    return [row for row in rows if kernel in (row.kernel, row.rival if isinstance(row, TimingRow) else None)]


def _times(rows: Iterable[_KernelRow], kernel: str) -> list[Time]:
    """The medians of every series of a kernel, from its side of each pair."""
    found = []
    for row in rows:
        if not isinstance(row, TimingRow):
            continue
        sides = (row.kernel, row.config, row.origin, row.a), (row.rival, row.rival_config, row.rival_origin, row.b)
        for (name, config, _, series), (other, _, origin, others) in (sides, sides[::-1]):
            if name == kernel and series and min(series) > 0:
                rival = other if other != kernel and others and origin != "candidate" else None
                medians = [float(statistics.median(times)) for times in (series, others) if times]
                found.append(Time(row.clock, medians[0], config, row.run, rival, medians[-1]))
    return found


def _config(own: Sequence[Time], rows: Sequence[_KernelRow]) -> str:
    """The config with the least device time in the latest run; else the first that was profiled, launched or refused."""
    if own:
        return min((one for one in own if one.run == own[0].run), key=lambda one: (one.clock != "graph", one.time_ns)).config
    return next((row.config for row in rows if row.config is not None), "")


def _by_clock(own: Sequence[Time], config: str) -> dict[Clock, Time]:
    """The least median of the latest run on each clock: beside slow rivals the GPU is cooler."""
    by_clock = grouped((one for one in own if one.config == config), lambda one: one.clock)
    latest = {clock: [one for one in times if one.run == times[0].run] for clock, times in by_clock.items()}
    return {clock: min(times, key=lambda one: one.time_ns) for clock, times in latest.items()}


def _seen(rows: Sequence[_KernelRow], config: str) -> tuple[SeenLaunch | None, Counters | None, str | None]:
    """The most important launch of a call, its counters, and the reason where there are none: the kernel was not profiled, or
    with another grid or block than the one that was timed."""
    profiles = [row for row in rows if isinstance(row, ProfileRow) and row.config == config]
    profiles = [row for row in profiles if row.run == profiles[0].run]
    launches = next((row.launches for row in rows if isinstance(row, CallPathRow) and row.config == config), [])
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
    # The launch with the most threads: there is no time of any single one. Copies and fills have none.
    every = [one for one in launches or [row.launch for row in profiles if row.launch] if one.threads]
    return max(every, key=lambda one: one.threads, default=None), counters, absent
