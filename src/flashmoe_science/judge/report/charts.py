"""Geometry of the report's charts, speed against length and rooflines: numbers for the template's SVG, in user units."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from flashmoe_science.judge.diagnose.roofline import Ceiling, Level, Roofline
from flashmoe_science.judge.formats import significant
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Series

COLOURS = 8  # in the template
_TICK_ROOM, _LABEL_ROOM = 34.0, 16.0  # user units that a label takes across, and upward
_FLAT: Mapping[Level, str] = {"tensor": "tensor cores", "matmul": "matrix product", "fma": "fp32 FMA"}
_UNITS = ((15, "P"), (12, "T"), (9, "G"), (6, "M"))


class Tick(NamedTuple):
    at: float
    label: str


class Dot(NamedTuple):
    x: float
    y: float
    style: str
    title: str


class Line(NamedTuple):
    """A line through ``points``; ``style`` holds its CSS classes. The text ``label`` ends at ``label_at``."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: str
    label: str = ""
    label_at: tuple[float, float] = (0.0, 0.0)


class Frame(NamedTuple):
    """The size of a drawing, and the rectangle within it that holds the lines and dots."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float


class Chart(NamedTuple):
    """Lines and dots over two axes. ``kind`` is "speed" or "roof"."""

    kind: Literal["speed", "roof"]
    title: str
    across: str
    upward: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    lines: Sequence[Line]
    dots: Sequence[Dot]
    frame: Frame


_SPEED = Frame(430.0, 250.0, 48.0, 418.0, 24.0, 214.0)
_ROOF = Frame(720.0, 420.0, 62.0, 694.0, 22.0, 372.0)


def _logarithmic(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """The axis on which ``low`` is at ``start`` and ``high`` at ``end``, and equal factors are equally far apart."""
    return lambda value: start + (end - start) * math.log(value / low) / math.log(high / low)


def colours_of(rows: Sequence[Verdict]) -> dict[str, int]:
    """Kernel -> colour, for the kernels that charts of these rows show: users' kernels, ours, then peers while there are
    colours, those with the highest TFLOP/s on any problem first."""
    chosen = dict.fromkeys(row.kernel for origin in ("candidate", "ours") for row in rows if row.origin == origin)
    peers = sorted((row for row in rows if row.origin == "peer" and row.tflops), key=lambda row: -(row.tflops or 0.0))
    chosen |= dict.fromkeys(row.kernel for row in peers)
    return {kernel: place for place, kernel in enumerate(list(chosen)[:COLOURS])}


def speed_charts(rows: Iterable[Verdict], colours: Mapping[str, int]) -> list[Chart]:
    """A chart for each family of at least three problems that differ in length alone, or in length and batch with the same
    number of tokens. A problem is drawn once, in the first of its families of that size. Kernels without a colour are left
    out."""
    left = [(row, series) for row in rows if row.tflops and (series := parse_problem(row.problem).series()) is not None]
    charts: list[Chart] = []
    for turn in range(max((len(series.families) for _, series in left), default=0)):
        groups: dict[tuple[str, ...], list[tuple[Verdict, Series]]] = defaultdict(list)
        for row, series in left:
            groups[(*series.families[min(turn, len(series.families) - 1)], row.gpu)].append((row, series))
        full = {key: group for key, group in groups.items() if len({row.problem for row, _ in group}) >= 3}
        charts += [_speed_chart(", ".join(filter(None, key)), group, colours) for key, group in full.items()]
        left = [one for key, group in groups.items() if key not in full for one in group]
    return charts


def _speed_chart(title: str, rows: Sequence[tuple[Verdict, Series]], colours: Mapping[str, int]) -> Chart:
    lengths = sorted({series.length for _, series in rows})
    values = _round_ticks(max((row.tflops or 0.0 for row, _ in rows if row.kernel in colours), default=0.0))
    x = _logarithmic(lengths[0], lengths[-1], _SPEED.left + 10, _SPEED.right - 10)

    def y(tflops: float) -> float:
        return _SPEED.bottom - (_SPEED.bottom - _SPEED.top) * tflops / values[-1]

    lines, dots = [], []
    origins = {row.kernel: row.origin or "peer" for row, _ in rows}
    # The peers' lines come first: the others are drawn over them.
    for kernel in sorted(colours.keys() & origins.keys(), key=lambda name: (origins[name] != "peer", colours[name])):
        own = sorted(((series.length, row) for row, series in rows if row.kernel == kernel), key=lambda one: one[0])
        style, places = f"c{colours[kernel]} {origins[kernel]}", [(x(length), y(row.tflops or 0.0)) for length, row in own]
        lines.append(Line(kernel, tuple(places), style))
        titles = (f"{kernel}, {row.problem}: {row.tflops:.4g} TFLOP/s" for _, row in own)
        dots += [Dot(*at, style, caption) for at, caption in zip(places, titles, strict=True)]
    ticks: list[Tick] = []
    for length in lengths:
        if not ticks or x(length) - ticks[-1].at >= _TICK_ROOM:
            ticks.append(Tick(x(length), str(length)))
    upward = [Tick(y(value), f"{value:g}") for value in values]
    return Chart("speed", title, rows[0][1].axis, "TFLOP/s", ticks, upward, lines, dots, _SPEED)


def _round_ticks(most: float) -> list[float]:
    """0 and three to six round steps, the last of them at or above ``most``."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / 4
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    return [round(step * index, 12) for index in range(math.ceil(most / step - 1e-9) + 1)]


def roofline_chart(roofline: Roofline, colours: Mapping[str, int]) -> Chart | None:
    """FLOP/s against FLOPs for each byte of memory, both logarithmic, of the kernels that have a colour. The memory ceiling is
    a slope up to the highest arithmetic ceiling; arithmetic ceilings are flat. None where no point has an intensity, or a
    ceiling of memory or of arithmetic is unknown."""
    points = [(point, at) for point in roofline.points if point.kernel in colours and (at := point.intensity("dram"))]
    memory = roofline.ceilings.get("dram")
    flats = sorted((roofline.ceilings[level] for level in _FLAT if level in roofline.ceilings), key=lambda one: -one.value)
    if not points or not flats or memory is None:
        return None
    ridge = flats[0].value / memory.value
    rates = [*(point.achieved for point, _ in points), *(flat.value for flat in flats)]
    # Whole decades that hold everything, and a little room above the highest rate.
    left, low = math.floor(math.log10(min(ridge / 4, *(at for _, at in points)))), math.floor(math.log10(min(rates)))
    right = max(left + 1, math.ceil(math.log10(max(ridge / 4, *(at for _, at in points))) + 1e-9))
    high = math.log10(max(rates)) + 0.15
    x = _logarithmic(10.0**left, 10.0**right, _ROOF.left, _ROOF.right)
    y = _logarithmic(10.0**low, 10.0**high, _ROOF.bottom, _ROOF.top)
    dots = [
        Dot(x(at), y(point.achieved), f"c{colours[point.kernel]}",
            f"{point.kernel}, {point.problem}: {point.achieved / 1e12:.3g} TFLOP/s at {at:.3g} FLOP/byte")
        for point, at in sorted(points, key=lambda one: -colours[one[0].kernel])  # ours, the first colours, over the others
    ]  # fmt: skip
    x_ticks = [Tick(x(10.0**power), f"{10.0**power:g}") for power in range(left, right + 1)]
    y_ticks = [Tick(y(10.0**power), _rate(power)) for power in range(low, math.floor(high) + 1)]
    start, end = max(10.0**left, 10.0**low / memory.value), min(ridge, 10.0**right)
    slope = [(x(at), y(at * memory.value)) for at in (start, start * (end / start) ** 0.85, end)]
    lines = [_ceiling_line(memory, "memory", "TB/s", slope, (slope[1][0] - 8, slope[1][1]))]
    above = -_LABEL_ROOM
    for flat in flats:  # labelled above the line, or below where another's label is
        height = y(flat.value)
        above = height - 5 if height - 5 - above >= _LABEL_ROOM else height + 14
        begin = min(max(_ROOF.left, x(flat.value / memory.value)), _ROOF.right)
        lines.append(
            _ceiling_line(flat, _FLAT[flat.level], "TFLOP/s", [(begin, height), (_ROOF.right, height)], (_ROOF.right, above))
        )
    title, across = f"{roofline.machine}, {roofline.dtype}", "FLOPs for each byte of memory traffic"
    return Chart("roof", title, across, "FLOP/s", x_ticks, y_ticks, lines, dots, _ROOF)


def _ceiling_line(of: Ceiling, name: str, unit: str, points: list[tuple[float, float]], label_at: tuple[float, float]) -> Line:
    """A ceiling's line with its label; a full line where the ceiling was measured, else dashed."""
    style = "measured" if of.measured else "specified"
    return Line(of.level, tuple(points), style, f"{name} {significant(of.value / 1e12)} {unit}, {style}", label_at)


def _rate(power: int) -> str:
    """10**power FLOP/s with a unit prefix: "100 G", "10 T"."""
    unit = next(((least, name) for least, name in _UNITS if power >= least), None)
    return f"{10.0**power:g}" if unit is None else f"{10 ** (power - unit[0])} {unit[1]}"
