"""Rooflines: a machine's ceilings, measured where a run measured them, else from the table of GPUs; and kernels under these
ceilings: the time that each ceiling alone would take, and the ceiling that binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from flashmoe_science.hardware.gpus import GPUS, Gpu
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import CeilingRow, CeilingUnit
from flashmoe_science.store import Run

Level = Literal["dram", "shared", "tensor", "fma", "special", "launch", "matmul"]

# CUDA Programming Guide, "Throughput of Native Arithmetic Instructions": of exp2, results an SM and clock, 8.0 to 10.0.
_SPECIAL_PER_SM = 16
_LAUNCH_NS = 850  # of an empty kernel in a CUDA graph, seen on an H200; `flashmoe diagnose` measures that of the GPU at hand
_SHARED_BYTES_PER_SM = 128  # guide: 32 banks of 4 bytes a clock

# Level -> the names of its measurements, for a dtype; the fastest counts.
_MEASURED: dict[Level, tuple[str, ...]] = {
    "dram": ("dram read", "dram copy"),
    "shared": ("shared read",),
    "tensor": ("tensor {dtype}",),
    "fma": ("fma fp32",),
    "special": ("exp2",),
    "launch": ("empty launch",),
    "matmul": ("matmul {dtype}",),
}


@dataclass(frozen=True, slots=True)
class Ceiling:
    """``value`` is in units a second; ``measured`` is False for a specification; ``how`` is the source."""

    level: Level
    value: float
    unit: CeilingUnit
    measured: bool
    how: str

    def __str__(self) -> str:
        source = "measured" if self.measured else "specified"
        if self.level == "launch":
            return f"{1e9 / self.value:.4g} ns for an empty launch ({source})"
        amount = f"{self.value / 1e12:.4g} T" if self.value >= 1e12 else f"{self.value / 1e9:.4g} G"
        return f"{amount}{self.unit} ({source})"


def ceilings(runs: Sequence[Run], machine: str, dtype: str) -> dict[Level, Ceiling]:
    """The ceilings of a machine (a GPU's short name, or "cpu") for a dtype; a level of unknown ceiling is left out.

    Of several measurements of a name the latest run's counts; of several names of a level the fastest.
    """
    gpu = GPUS.get(machine)
    found = {one.level: one for one in _specified(gpu, dtype)} if gpu else {}
    rows: dict[str, CeilingRow] = {}
    for run in sorted(runs, key=lambda run: run.age):
        if gpu_name(run.header.environment) == machine:
            rows |= {row.name: row for row in run.of(CeilingRow) if row.samples}
    for level, names in _MEASURED.items():
        measured = [rows[name] for name in (name.format(dtype=dtype) for name in names) if name in rows]
        if measured:
            best = max(measured, key=lambda row: row.value)
            found[level] = Ceiling(level, best.value, best.unit, True, f"{best.name}: {best.how}")
    return found


def _specified(gpu: Gpu, dtype: str) -> list[Ceiling]:
    at_clock, of = gpu.sm_count * gpu.boost_clock_hz, f"{gpu.product}: "
    found = [
        Ceiling("dram", gpu.memory_bandwidth, "B/s", False, f"{of}memory bandwidth"),
        Ceiling("fma", gpu.fp32_flops, "FLOP/s", False, f"{of}fp32 without tensor cores"),
        Ceiling("special", _SPECIAL_PER_SM * at_clock, "op/s", False, f"{of}16 an SM and clock, at the boost clock"),
        Ceiling("shared", _SHARED_BYTES_PER_SM * at_clock, "B/s", False, f"{of}128 bytes an SM and clock, at the boost clock"),
        Ceiling("launch", 1e9 / _LAUNCH_NS, "op/s", False, "an empty kernel in a CUDA graph, as an H200 has it"),
    ]
    if dtype in ("fp16", "bf16"):
        found.append(Ceiling("tensor", gpu.tensor_flops_16bit, "FLOP/s", False, f"{of}dense 16-bit tensor rate"))
    return found


@dataclass(frozen=True, slots=True)
class Need:
    """The least ``amount`` of bytes, FLOPs or operations of a level that the problem needs, and the least time that they take
    under the level's ceiling."""

    ceiling: Ceiling
    amount: float
    least_ns: float
    share: float  # of the measured time: how much of the ceiling is reached


@dataclass(frozen=True, slots=True)
class Point:
    """One kernel on one problem. ``achieved`` is FLOP/s, masked work not counted.

    ``needs`` holds a Need for each level that has a ceiling and an amount; the first one's ceiling binds.
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
        """The need with the greatest ``least_ns``, below which no change of the kernel alone can get."""
        return self.needs[0] if self.needs else None

    def need(self, level: Level) -> Need | None:
        return next((need for need in self.needs if need.ceiling.level == level), None)

    def intensity(self, level: Level) -> float | None:
        """FLOPs for each byte (or operation) of a level: the abscissa of its roofline. None where the amount is unknown."""
        need = self.need(level)
        return self.flops / need.amount if need else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"achieved": self.achieved, "binding": self.binding.ceiling.level if self.binding else None}


@dataclass(frozen=True, slots=True)
class Roofline:
    """A machine's ceilings for one dtype, and what was measured under them."""

    machine: str
    dtype: str
    ceilings: Mapping[Level, Ceiling]
    points: tuple[Point, ...]


def rooflines(runs: Sequence[Run], verdicts: Sequence[Verdict]) -> list[Roofline]:
    """A roofline for each machine and dtype of the single-GPU verdicts, by device time where there is a GPU."""
    device = (row for row in verdicts if row.clock == ("eager" if row.gpu == "cpu" else "graph"))
    device = (row for row in device if parse_problem(row.problem).gpus() == 1)  # ceilings are one GPU's
    drawn = []
    for (machine, dtype), rows in grouped(device, lambda row: (row.gpu, parse_problem(row.problem).dtype)).items():
        above = ceilings(runs, machine, dtype)
        points = (place(row.problem, row.kernel, row.config, row.time_ns, above) for row in rows if row.time_ns)
        drawn.append(Roofline(machine, dtype, above, tuple(dict.fromkeys(points))))
    return drawn


def place(problem: str, kernel: str, config: str, time_ns: float, above: Mapping[Level, Ceiling]) -> Point:
    """The point of one time (ns) under the ceilings ``above``, by the least that the problem needs of each level."""
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
