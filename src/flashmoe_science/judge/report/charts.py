"""Geometry of the report's charts: plain numbers that the template draws.

A ratio chart is laid out by the page, so that it fits a telephone and a printed page: places are per cent of its track. The
others, speed against length here and the roofline in ``roofline_chart``, are drawn as SVG: places are in user units.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flashmoe_science.judge.formats import times, with_interval
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Series

COLOURS = 8  # that the template has
_RATIO_TICKS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 0.98,
    1, 1.02, 1.05, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 8, 12, 20, 50, 100, 200, 500, 1000,
)  # fmt: skip
_TICK_ROOM = 34.0  # user units that a label takes
_TICK_SHARE = 12.0  # per cent of the narrowest track that a label takes


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class RatioRow:
    """One ratio: where its dot and its interval's ends lie, or None where it has no number. ``state`` is its verdict."""

    label: str
    state: str
    words: str
    title: str
    dot: float | None = None
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class RatioChart:
    """``one`` is where the ratio is 1."""

    one: float
    ticks: tuple[Tick, ...]
    rows: tuple[RatioRow, ...]


def ratio_chart(rows: Sequence[Verdict]) -> RatioChart:
    """A row a verdict, on a logarithmic axis, on which 2 and 1/2 are as far from 1. It spans 0.9 to 1.1, or more."""
    bounds = [bound for row in rows if row.low and row.high for bound in (row.low, row.high)]
    # Beyond the range that is always shown, some room for the next tick.
    least = min([0.9, *(bound / 1.15 for bound in bounds if bound < 0.9)])
    most = max([1.1, *(bound * 1.15 for bound in bounds if bound > 1.1)])
    span = math.log(most / least)

    def x(ratio: float) -> float:
        return round(3 + 94 * math.log(ratio / least) / span, 3)

    drawn = []
    for row in rows:
        if row.ratio is None or row.low is None or row.high is None:
            title = f"{row.problem}: {row.kernel} {row.verdict}, {row.reason}"
            drawn.append(RatioRow(row.problem, row.verdict, row.verdict, title))
        else:
            words, found = f"{times(row.ratio)} {row.rival}", with_interval(row.ratio, row.low, row.high)
            title = f"{row.problem}: {row.kernel} against {row.rival}, {found}, {row.verdict}"
            drawn.append(RatioRow(row.problem, row.verdict, words, title, x(row.ratio), x(row.low), x(row.high)))
    ticks: list[Tick] = []
    for tick in sorted((t for t in _RATIO_TICKS if least <= t <= most), key=lambda t: abs(math.log(t))):  # 1 first: it stays
        if all(abs(x(tick) - other.at) >= _TICK_SHARE for other in ticks):
            ticks.append(Tick(x(tick), f"{tick:g}x"))
    return RatioChart(x(1.0), tuple(ticks), tuple(drawn))


@dataclass(frozen=True, slots=True)
class Dot:
    x: float
    y: float
    style: str
    title: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line through ``points``; ``style`` is its classes. ``label`` stands at ``label_at``, or ends there with ``ends``."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: str
    label: str = ""
    label_at: tuple[float, float] = (0.0, 0.0)
    ends: bool = False

    @property
    def path(self) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of a drawing, and the rectangle within it that holds the lines and dots."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines and dots over two axes. ``kind`` is "speed" or "roof"."""

    kind: Literal["speed", "roof"]
    title: str
    across: str
    upward: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    dots: tuple[Dot, ...]
    frame: Frame


_SPEED = Frame(430.0, 250.0, 48.0, 418.0, 24.0, 214.0)


def logarithmic(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """The axis on which ``low`` is at ``start`` and ``high`` at ``end``, and equal factors are equally far apart."""
    return lambda value: start + (end - start) * math.log(value / low) / math.log(high / low)


def speed_charts(rows: Iterable[Verdict], colours: Mapping[str, int]) -> list[Chart]:
    """A chart a family of problems that differ in nothing but their length, and in the batch where that keeps the number of
    tokens. Kernels without a colour are left out."""
    return [_speed_chart(title, members, colours) for title, members in _families([row for row in rows if row.tflops])]


def colours_of(rows: Sequence[Verdict]) -> dict[str, int]:
    """Kernel -> colour, for the kernels that charts of these rows show: users' kernels, ours, then as many peers as there are
    colours left, those first that are fastest on some problem."""
    chosen = dict.fromkeys(row.kernel for origin in ("candidate", "ours") for row in rows if row.origin == origin)
    peers = sorted((row for row in rows if row.origin == "peer" and row.tflops), key=lambda row: -(row.tflops or 0.0))
    chosen |= dict.fromkeys(row.kernel for row in peers)
    return {kernel: place for place, kernel in enumerate(list(chosen)[:COLOURS])}


def _families(rows: Sequence[Verdict]) -> list[tuple[str, list[Verdict]]]:
    """Groups of at least three lengths, by the first family of each problem; of the rest, by its second, and so on."""
    left = [(row, series) for row in rows if (series := parse_problem(row.problem).series()) is not None]
    found: list[tuple[str, list[Verdict]]] = []
    for turn in range(max((len(series.families) for _, series in left), default=0)):
        groups: dict[tuple[str, ...], list[Verdict]] = defaultdict(list)
        for row, series in left:
            groups[_family(row, series, turn)].append(row)
        full = {key: group for key, group in groups.items() if len({row.problem for row in group}) >= 3}
        found += [(", ".join(word for word in key if word), group) for key, group in full.items()]
        left = [(row, series) for row, series in left if _family(row, series, turn) not in full]
    return found


def _family(row: Verdict, series: Series, turn: int) -> tuple[str, ...]:
    return (*series.families[min(turn, len(series.families) - 1)], row.gpu)


def _series(row: Verdict) -> Series:
    series = parse_problem(row.problem).series()
    assert series is not None  # _families left the others out
    return series


def _speed_chart(title: str, rows: Sequence[Verdict], colours: Mapping[str, int]) -> Chart:
    lengths = sorted({_series(row).length for row in rows})
    values = _round_ticks(max((row.tflops or 0.0 for row in rows if row.kernel in colours), default=0.0))
    x = logarithmic(lengths[0], lengths[-1], _SPEED.left + 10, _SPEED.right - 10)

    def y(tflops: float) -> float:
        return _SPEED.bottom - (_SPEED.bottom - _SPEED.top) * tflops / values[-1]

    lines: list[Line] = []
    dots: list[Dot] = []
    origins = {row.kernel: row.origin or "peer" for row in rows}
    for kernel in sorted(colours.keys() & origins.keys(), key=lambda name: (origins[name] != "peer", colours[name])):
        own = sorted((row for row in rows if row.kernel == kernel), key=lambda row: _series(row).length)
        style = f"c{colours[kernel]} {origins[kernel]}"
        places = tuple((x(_series(row).length), y(row.tflops or 0.0)) for row in own)
        lines.append(Line(kernel, places, style))
        titles = (f"{kernel}, {row.problem}: {row.tflops:.4g} TFLOP/s" for row in own)
        dots += [Dot(*at, style, told) for at, told in zip(places, titles, strict=True)]
    ticks: list[Tick] = []
    for length in lengths:
        if not ticks or x(length) - ticks[-1].at >= _TICK_ROOM:
            ticks.append(Tick(x(length), str(length)))
    upward = tuple(Tick(y(value), f"{value:g}") for value in values)
    # The peers' lines come first: the others are drawn over them.
    return Chart("speed", title, _series(rows[0]).axis, "TFLOP/s", tuple(ticks), upward, tuple(lines), tuple(dots), _SPEED)


def _round_ticks(most: float) -> list[float]:
    """0 and three to six round steps, the last of them at or above ``most``."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / 4
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    return [round(step * index, 12) for index in range(math.ceil(most / step - 1e-9) + 1)]
