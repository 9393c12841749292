"""Where measured times stand under a machine's ceilings: what each ceiling alone would take, and which of them binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashmoe_science.hardware.gpus import GPUS
from flashmoe_science.judge.diagnose.ceilings import Ceiling, Level, ceilings
from flashmoe_science.judge.standing import verdicts
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.store import Run


@dataclass(frozen=True, slots=True)
class Need:
    """``amount`` bytes, FLOPs or operations of a level that the problem cannot do without, and the least time in which its
    ceiling lets them through."""

    ceiling: Ceiling
    amount: float
    least_ns: float
    share: float  # of the measured time: how much of the ceiling is reached

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
        points = (place(row.problem, row.kernel, row.config, row.time_ns, above) for row in rows if row.time_ns)
        drawn.append(Roofline(machine, dtype, above, tuple(dict.fromkeys(points))))
    return drawn


def place(problem: str, kernel: str, config: str, time_ns: float, above: Mapping[Level, Ceiling]) -> Point:
    """Hold one time (ns) against the ceilings, by the least that the problem needs of each."""
    asked = parse_problem(problem)
    arithmetic: Level = "matmul" if "matmul" in above else "tensor" if "tensor" in above else "fma"
    amounts: dict[Level, float] = {
        "dram": asked.min_bytes(), arithmetic: asked.flops(), "launch": 1, "special": asked.exponentials()
    }  # fmt: skip
    needs = []
    for level, amount in amounts.items():
        if level in above and amount:
            least = amount / above[level].value * 1e9
            needs.append(Need(above[level], amount, least, least / time_ns))
    needs.sort(key=lambda need: -need.least_ns)
    return Point(problem, kernel, config, time_ns, asked.flops(), tuple(needs))
