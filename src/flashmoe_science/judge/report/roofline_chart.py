"""Geometry of a roofline: FLOP/s against FLOPs for each byte of memory, both logarithmic. Lengths are in SVG user units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashmoe_science.judge.diagnose.ceilings import Ceiling, Level
from flashmoe_science.judge.diagnose.roofline import Roofline
from flashmoe_science.judge.formats import significant
from flashmoe_science.judge.report.charts import Tick

WIDTH, HEIGHT = 720.0, 420.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 694.0, 22.0, 372.0
_LABEL_ROOM = 16.0
_NAMES: Mapping[Level, str] = {
    "dram": "memory", "l2": "L2 cache", "shared": "shared memory", "tensor": "tensor cores", "fma": "fp32 FMA",
    "special": "special functions", "matmul": "matrix product",
}  # fmt: skip
_FLAT: tuple[Level, ...] = ("tensor", "matmul", "fma")  # FLOP/s, whatever the traffic
_SLOPED: tuple[Level, ...] = ("dram", "l2")  # bytes/s


@dataclass(frozen=True, slots=True)
class Roof:
    """One ceiling as a line, with its label beside it; ``turn`` is in degrees about the label's own place."""

    level: Level
    x1: float
    y1: float
    x2: float
    y2: float
    label: str
    label_x: float
    label_y: float
    turn: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Mark:
    kernel: str
    colour: int
    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class RooflineChart:
    title: str
    across: tuple[Tick, ...]
    upward: tuple[Tick, ...]
    roofs: tuple[Roof, ...]
    marks: tuple[Mark, ...]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = _LEFT
    right: float = _RIGHT
    top: float = _TOP
    bottom: float = _BOTTOM


class _Axes:
    """Whole decades in both directions that hold everything."""

    def __init__(self, intensities: Sequence[float], rates: Sequence[float]) -> None:
        self.x0, self.x1 = math.floor(math.log10(min(intensities))), math.ceil(math.log10(max(intensities)) + 1e-9)
        self.y0, self.y1 = math.floor(math.log10(min(rates))), math.log10(max(rates)) + 0.15
        self.x1 = max(self.x1, self.x0 + 1)

    def x(self, intensity: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (math.log10(intensity) - self.x0) / (self.x1 - self.x0)

    def y(self, rate: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (math.log10(rate) - self.y0) / (self.y1 - self.y0)

    @property
    def turn(self) -> float:
        """Degrees by which a line of slope 1 in logarithms rises on the page."""
        across, up = (_RIGHT - _LEFT) / (self.x1 - self.x0), (_BOTTOM - _TOP) / (self.y1 - self.y0)
        return -math.degrees(math.atan2(up, across))


def roofline_chart(roofline: Roofline, colours: Mapping[str, int]) -> RooflineChart | None:
    """The chart of the kernels that have a colour; None where no point has an intensity, or no ceiling is known."""
    points = [(point, at) for point in roofline.points if point.kernel in colours and (at := point.intensity("dram"))]
    flats = [roofline.ceilings[level] for level in _FLAT if level in roofline.ceilings]
    slopes = [roofline.ceilings[level] for level in _SLOPED if level in roofline.ceilings]
    if not points or not flats or not slopes:
        return None
    highest = max(flat.value for flat in flats)
    ridges = [highest / slope.value for slope in slopes]
    intensities = [at for _, at in points]
    axes = _Axes(
        [*intensities, *(ridge / 4 for ridge in ridges)],
        [*(point.achieved for point, _ in points), *(flat.value for flat in flats)],
    )
    marks = [
        Mark(
            kernel=point.kernel,
            colour=colours[point.kernel],
            x=axes.x(at),
            y=axes.y(point.achieved),
            title=f"{point.kernel}, {point.problem}: {point.achieved / 1e12:.3g} TFLOP/s at {at:.3g} FLOP/byte",
        )
        for point, at in points
    ]
    marks.sort(key=lambda mark: -mark.colour)  # ours, which have the first colours, over the others
    return RooflineChart(
        title=f"{roofline.machine}, {roofline.dtype}",
        across=tuple(Tick(axes.x(10.0**power), _power(power)) for power in range(axes.x0, axes.x1 + 1)),
        upward=tuple(Tick(axes.y(10.0**power), _rate(power)) for power in range(axes.y0, math.floor(axes.y1) + 1)),
        roofs=(*(_slope(axes, slope, highest, ridges) for slope in slopes), *_flats(axes, flats, slopes)),
        marks=tuple(marks),
    )


def _slope(axes: _Axes, ceiling: Ceiling, highest: float, ridges: Sequence[float]) -> Roof:
    """Memory's ceiling, from the left edge, or where it leaves the floor, up to the highest flat one.

    ``ridges`` are the intensities at which the slopes reach that; the highest slope is labelled above it, others below.
    """
    start = max(10.0**axes.x0, 10.0**axes.y0 / ceiling.value)
    end = highest / ceiling.value
    x1, y1, x2, y2 = axes.x(start), axes.y(start * ceiling.value), axes.x(end), axes.y(highest)
    top = end <= min(ridges)
    at = start * (end / start) ** (0.3 if top else 0.05)
    return Roof(
        level=ceiling.level,
        x1=x1,
        y1=y1,
        x2=min(x2, _RIGHT),
        y2=y2 if x2 <= _RIGHT else axes.y(10.0**axes.x1 * ceiling.value),
        label=f"{_NAMES[ceiling.level]} {significant(ceiling.value / 1e12)} TB/s, {_whence(ceiling)}",
        label_x=axes.x(at),
        label_y=axes.y(at * ceiling.value) + (-6 if top else 16),
        turn=axes.turn,
        measured=ceiling.measured,
    )


def _flats(axes: _Axes, ceilings: Sequence[Ceiling], slopes: Sequence[Ceiling]) -> list[Roof]:
    """The arithmetic ceilings, each labelled above its line, or below it where another's label is."""
    drawn: list[Roof] = []
    for ceiling in sorted(ceilings, key=lambda one: -one.value):
        above = drawn[-1].label_y if drawn else -_LABEL_ROOM
        label_y = axes.y(ceiling.value) - 5
        drawn.append(_flat(axes, ceiling, slopes, label_y if label_y - above >= _LABEL_ROOM else label_y + 19))
    return drawn


def _flat(axes: _Axes, ceiling: Ceiling, slopes: Sequence[Ceiling], label_y: float) -> Roof:
    """An arithmetic ceiling, from where the highest slope meets it to the right edge."""
    y = axes.y(ceiling.value)
    start = max(_LEFT, axes.x(ceiling.value / max(slope.value for slope in slopes)))
    return Roof(
        level=ceiling.level,
        x1=min(start, _RIGHT),
        y1=y,
        x2=_RIGHT,
        y2=y,
        label=f"{_NAMES[ceiling.level]} {significant(ceiling.value / 1e12)} TFLOP/s, {_whence(ceiling)}",
        label_x=_RIGHT,
        label_y=label_y,
        turn=0.0,
        measured=ceiling.measured,
    )


def _whence(ceiling: Ceiling) -> str:
    return "measured" if ceiling.measured else "specified"


def _power(power: int) -> str:
    return f"{10.0**power:g}"


def _rate(power: int) -> str:
    """FLOP/s in the unit that a reader would take: 100 G, 10 T."""
    for unit, of in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if power >= unit:
            return f"{10 ** (power - unit)} {of}"
    return f"{10.0**power:g}"
