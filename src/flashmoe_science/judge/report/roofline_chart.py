"""Geometry of a roofline: FLOP/s against FLOPs for each byte of memory, both logarithmic. Lengths are in SVG user units."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from flashmoe_science.judge.diagnose.ceilings import Ceiling, Level
from flashmoe_science.judge.diagnose.roofline import Roofline
from flashmoe_science.judge.formats import significant
from flashmoe_science.judge.report.charts import Chart, Dot, Frame, Line, Tick, logarithmic

_FRAME = Frame(720.0, 420.0, 62.0, 694.0, 22.0, 372.0)
_LABEL_ROOM = 16.0
_NAMES: Mapping[Level, str] = {
    "dram": "memory", "l2": "L2 cache", "tensor": "tensor cores", "fma": "fp32 FMA", "matmul": "matrix product",
}  # fmt: skip
_FLAT: tuple[Level, ...] = ("tensor", "matmul", "fma")  # FLOP/s, whatever the traffic
_SLOPED: tuple[Level, ...] = ("dram", "l2")  # bytes/s
_UNITS = ((15, "P"), (12, "T"), (9, "G"), (6, "M"))

Axis = Callable[[float], float]


def roofline_chart(roofline: Roofline, colours: Mapping[str, int]) -> Chart | None:
    """The chart of the kernels that have a colour; None where no point has an intensity, or no ceiling is known."""
    points = [(point, at) for point in roofline.points if point.kernel in colours and (at := point.intensity("dram"))]
    flats = [roofline.ceilings[level] for level in _FLAT if level in roofline.ceilings]
    slopes = [roofline.ceilings[level] for level in _SLOPED if level in roofline.ceilings]
    if not points or not flats or not slopes:
        return None
    highest = max(flat.value for flat in flats)
    intensities = [*(at for _, at in points), *(highest / slope.value / 4 for slope in slopes)]
    rates = [*(point.achieved for point, _ in points), *(flat.value for flat in flats)]
    # Whole decades that hold everything, and a little room above the highest rate.
    left, low = math.floor(math.log10(min(intensities))), math.floor(math.log10(min(rates)))
    right, high = max(left + 1, math.ceil(math.log10(max(intensities)) + 1e-9)), math.log10(max(rates)) + 0.15
    x = logarithmic(10.0**left, 10.0**right, _FRAME.left, _FRAME.right)
    y = logarithmic(10.0**low, 10.0**high, _FRAME.bottom, _FRAME.top)
    edges = (10.0**left, 10.0**right, 10.0**low)
    dots = [
        Dot(
            x(at),
            y(point.achieved),
            f"c{colours[point.kernel]}",
            f"{point.kernel}, {point.problem}: {point.achieved / 1e12:.3g} TFLOP/s at {at:.3g} FLOP/byte",
        )
        for point, at in sorted(points, key=lambda one: -colours[one[0].kernel])  # ours, the first colours, over the others
    ]
    return Chart(
        kind="roof",
        title=f"{roofline.machine}, {roofline.dtype}",
        across="FLOPs for each byte of memory traffic",
        upward="FLOP/s",
        x_ticks=tuple(Tick(x(10.0**power), f"{10.0**power:g}") for power in range(left, right + 1)),
        y_ticks=tuple(Tick(y(10.0**power), _rate(power)) for power in range(low, math.floor(high) + 1)),
        lines=(*_slopes(x, y, slopes, highest, edges), *_flats(x, y, flats, max(one.value for one in slopes))),
        dots=tuple(dots),
        frame=_FRAME,
    )


def _slopes(x: Axis, y: Axis, ceilings: Sequence[Ceiling], highest: float, edges: tuple[float, float, float]) -> list[Line]:
    """Memory's ceilings, from the left edge, or where they leave the floor, up to the highest flat one or the right edge.

    The label of the highest ends at its line, the others' begin at theirs: neither crosses another line."""
    leftmost, rightmost, lowest = edges
    drawn = []
    for ceiling in ceilings:
        start, end = max(leftmost, lowest / ceiling.value), min(highest / ceiling.value, rightmost)
        top = ceiling.value == max(one.value for one in ceilings)
        at = start * (end / start) ** (0.85 if top else 0.1)
        label_at = (x(at) - 8, y(at * ceiling.value)) if top else (x(at) + 10, y(at * ceiling.value) + 8)
        places = tuple((x(one), y(one * ceiling.value)) for one in (start, end))
        drawn.append(Line(ceiling.level, places, _style(ceiling), _label(ceiling, "TB/s"), label_at, ends=top))
    return drawn


def _flats(x: Axis, y: Axis, ceilings: Sequence[Ceiling], steepest: float) -> list[Line]:
    """The arithmetic ceilings, from where the highest slope meets them to the right edge, each labelled above its line, or
    below it where another's label is."""
    drawn: list[Line] = []
    for ceiling in sorted(ceilings, key=lambda one: -one.value):
        at, above = y(ceiling.value), drawn[-1].label_at[1] if drawn else -_LABEL_ROOM
        label_y = at - 5 if at - 5 - above >= _LABEL_ROOM else at + 14
        start = min(max(_FRAME.left, x(ceiling.value / steepest)), _FRAME.right)
        places = ((start, at), (_FRAME.right, at))
        label_at = (_FRAME.right, label_y)
        drawn.append(Line(ceiling.level, places, _style(ceiling), _label(ceiling, "TFLOP/s"), label_at, ends=True))
    return drawn


def _style(ceiling: Ceiling) -> str:
    return "measured" if ceiling.measured else "specified"


def _label(ceiling: Ceiling, unit: str) -> str:
    return f"{_NAMES[ceiling.level]} {significant(ceiling.value / 1e12)} {unit}, {_style(ceiling)}"


def _rate(power: int) -> str:
    """FLOP/s in the unit that a reader would take: 100 G, 10 T."""
    unit = next(((least, name) for least, name in _UNITS if power >= least), None)
    return f"{10.0**power:g}" if unit is None else f"{10 ** (power - unit[0])} {unit[1]}"
