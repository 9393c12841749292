"""Where measured times stand under a machine's ceilings: what each ceiling alone would take, and which of them binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashmoe_science.hardware.counters import Counters
from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.diagnose.ceilings import Ceiling, Level, ceilings
from flashmoe_science.judge.standing import verdicts
from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.records import ProfileRow
from flashmoe_science.store import Run


@dataclass(frozen=True, slots=True)
class Need:
    """``amount`` bytes, FLOPs or operations of a level, and the least time in which its ceiling lets them through.

    ``counted`` tells what a counter saw from what the problem cannot do without.
    """

    ceiling: Ceiling
    amount: float
    least_ns: float
    share: float  # of the measured time: how much of the ceiling is reached
    counted: bool

    @property
    def level(self) -> Level:
        return self.ceiling.level


@dataclass(frozen=True, slots=True)
class Point:
    """One kernel on one problem. ``achieved`` is FLOP/s, masked work not counted.

    ``needs`` holds a Need for each level that has a ceiling and an amount, the one that binds first.
    """

    problem: str
    kernel: str
    config: str
    time_ns: float
    flops: int
    needs: tuple[Need, ...]

    @property
    def achieved(self) -> float:
        return self.flops / self.time_ns * 1e9

    @property
    def binding(self) -> Need | None:
        """The ceiling that would take longest: no change of the kernel alone gets below its ``least_ns``."""
        return self.needs[0] if self.needs else None

    def need(self, level: Level) -> Need | None:
        return next((need for need in self.needs if need.level == level), None)

    def intensity(self, level: Level) -> float | None:
        """FLOPs for each byte (or operation) of a level: the abscissa of its roofline. None where the amount is unknown."""
        need = self.need(level)
        return self.flops / need.amount if need and need.amount else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"achieved": self.achieved, "binding": self.binding.level if self.binding else None}


@dataclass(frozen=True, slots=True)
class Roofline:
    """A machine's ceilings for one dtype, and what was measured under them."""

    machine: str
    dtype: str
    ceilings: Mapping[Level, Ceiling]
    points: tuple[Point, ...]


def rooflines(runs: Sequence[Run], standing: Sequence[Verdict] | None = None) -> list[Roofline]:
    """One for each machine and dtype that the standing verdicts speak of. Device time is taken where there is a GPU.

    ``standing`` are those verdicts, where they are at hand.
    """
    grouped: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts(runs) if standing is None else standing:
        if verdict.time_ns and verdict.clock == ("eager" if verdict.gpu == "cpu" else "graph"):
            grouped.setdefault((verdict.gpu, parse_problem(verdict.problem).dtype), []).append(verdict)
    drawn = []
    for (machine, dtype), rows in grouped.items():
        above = ceilings(runs, machine, GPUS.get(machine), dtype)
        seen = _profiles([run for run in runs if gpu_name(run.header.environment) == machine])
        points = [
            place(row.problem, row.kernel, row.config, row.time_ns, above, seen.get((row.problem, row.kernel, row.config)))
            for row in rows
            if row.time_ns
        ]
        drawn.append(Roofline(machine, dtype, above, tuple(dict.fromkeys(points))))
    return drawn


def place(
    problem: str, kernel: str, config: str, time_ns: float, above: Mapping[Level, Ceiling], counters: Counters | None = None
) -> Point:
    """Hold one time (ns) against the ceilings. Traffic is what ``counters`` saw, else the least that the problem needs."""
    asked = parse_problem(problem)
    needs = []
    for level, (amount, counted) in _amounts(asked, above, counters).items():
        least = amount / above[level].value * 1e9
        needs.append(Need(above[level], amount, least, least / time_ns, counted))
    needs.sort(key=lambda need: -need.least_ns)
    return Point(problem, kernel, config, time_ns, asked.flops(), tuple(needs))


def _amounts(problem: Problem, above: Mapping[Level, Ceiling], counters: Counters | None) -> dict[Level, tuple[float, bool]]:
    """Level -> what must pass it, and whether that was counted."""
    found: dict[Level, tuple[float, bool]] = {}
    moved = None if counters is None else counters.total("dram_read_bytes", "dram_write_bytes")
    found["dram"] = (problem.min_bytes(), False) if moved is None else (moved, True)
    if counters is not None and (through_l2 := counters["l2_bytes"]) is not None:
        found["l2"] = (through_l2, True)
    arithmetic: Level = "matmul" if "matmul" in above else "tensor" if "tensor" in above else "fma"
    found[arithmetic] = (problem.flops(), False)
    found["launch"] = (1, False)
    if problem.exponentials():
        found["special"] = (problem.exponentials(), False)
    return {level: found[level] for level in found if level in above}


def _profiles(runs: Sequence[Run]) -> dict[tuple[str, str, str], Counters]:
    """Counters of calls that were one launch: of several, no single one's traffic is the call's."""
    found: dict[tuple[str, str, str], Counters] = {}
    for run in runs:
        by_call: dict[tuple[str, str, str], list[ProfileRow]] = {}
        for row in run.rows:
            if isinstance(row, ProfileRow):
                by_call.setdefault((row.problem, row.kernel, row.config), []).append(row)
        found |= {key: Counters(rows[0].metrics) for key, rows in by_call.items() if len(rows) == 1 and rows[0].metrics}
    return found
