"""Geometry of the report's charts of ratios and speeds: plain numbers that the template draws.

A ratio chart is laid out by the page, so that it fits a telephone and a printed page: places are per cent of its track. A speed
chart is drawn as SVG: places are in user units.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashmoe_science.judge.formats import times, with_interval
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Series

_RATIO_TICKS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 0.98,
    1, 1.02, 1.05, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 8, 12, 20, 50, 100, 200, 500, 1000,
)  # fmt: skip
_TICK_ROOM = 34.0  # user units that a label takes
_TICK_SHARE = 12.0  # per cent of the narrowest track that a label takes
_MOST_PEERS = 6  # lines in one speed chart beside ours; more cannot be told apart


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class RatioRow:
    """One ratio: where its dot and its interval's ends lie, or None where it has no number."""

    label: str
    said: str  # a verdict, which is also the colour
    told: str
    title: str
    dot: float | None = None
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class RatioChart:
    one: float  # where the ratio is 1
    ticks: tuple[Tick, ...]
    rows: tuple[RatioRow, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """What a ratio chart draws: one ratio with its interval, None where there is no number, and what is said of it."""

    label: str
    said: str
    told: str
    title: str
    ratio: float | None
    low: float | None
    high: float | None


def ratio_of(row: Verdict) -> Ratio:
    """A verdict as a ratio chart shows it."""
    if row.ratio is None or row.low is None or row.high is None:
        title = f"{row.problem}: {row.kernel} {row.verdict}, {row.reason}"
        return Ratio(row.problem, row.verdict, row.verdict, title, None, None, None)
    told = f"{times(row.ratio)} {row.rival}"
    title = f"{row.problem}: {row.kernel} against {row.rival}, {with_interval(row.ratio, row.low, row.high)}, {row.verdict}"
    return Ratio(row.problem, row.verdict, told, title, row.ratio, row.low, row.high)


def ratio_chart(rows: Sequence[Ratio], least: float = 0.9, most: float = 1.1) -> RatioChart:
    """A row a ratio, on a logarithmic axis, on which 2 and 1/2 are as far from 1. It spans ``least`` to ``most``, or more."""
    bounds = [bound for row in rows if row.low and row.high for bound in (row.low, row.high)]
    # Beyond the range that is always shown, some room for the next tick.
    least, most = (
        min([least, *(bound / 1.15 for bound in bounds if bound < least)]),
        max([most, *(bound * 1.15 for bound in bounds if bound > most)]),
    )
    span = math.log(most / least)

    def x(ratio: float) -> float:
        return round(3 + 94 * math.log(ratio / least) / span, 3)

    drawn = []
    for row in rows:
        if row.ratio is None or row.low is None or row.high is None:
            drawn.append(RatioRow(row.label, row.said, row.told, row.title))
        else:
            drawn.append(RatioRow(row.label, row.said, row.told, row.title, x(row.ratio), x(row.low), x(row.high)))
    ticks: list[Tick] = []
    for tick in sorted((t for t in _RATIO_TICKS if least <= t <= most), key=lambda t: abs(math.log(t))):  # 1 first: it stays
        if all(abs(x(tick) - other.at) >= _TICK_SHARE for other in ticks):
            ticks.append(Tick(x(tick), f"{tick:g}x"))
    return RatioChart(x(1.0), tuple(ticks), tuple(drawn))


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Line:
    kernel: str
    origin: str
    colour: int  # place in the report's palette
    points: tuple[Point, ...]

    @property
    def path(self) -> str:
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)


@dataclass(frozen=True, slots=True)
class SpeedChart:
    title: str
    against: str
    width: float
    height: float
    left: float
    bottom: float
    right: float
    top: float
    across: tuple[Tick, ...]
    upward: tuple[Tick, ...]
    lines: tuple[Line, ...]


def speed_charts(rows: Iterable[Verdict], colours: dict[str, int]) -> list[SpeedChart]:
    """TFLOP/s against sequence length, a chart a family of problems that differ in nothing but their length, and in the batch
    where that keeps the number of tokens."""
    charts = []
    for title, members in _families([row for row in rows if row.tflops is not None]):
        charts.append(_speed_chart(title, members, colours))
    return charts


def shown_kernels(rows: Sequence[Verdict]) -> list[str]:
    """Kernels that speed charts show: ours, candidates, then the peers that are most often near the front."""
    ours = list(dict.fromkeys(row.kernel for origin in ("ours", "candidate") for row in rows if row.origin == origin))
    best: dict[tuple[str, str, str], float] = defaultdict(float)
    for row in rows:
        key = (row.problem, row.clock, row.gpu)
        best[key] = max(best[key], row.tflops or 0.0)
    standing: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.origin == "peer" and row.tflops:
            standing[row.kernel].append(row.tflops / best[row.problem, row.clock, row.gpu])
    peers = sorted(standing, key=lambda kernel: (-max(standing[kernel]), kernel))
    return [*ours, *peers[:_MOST_PEERS]]


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


def _speed_chart(title: str, rows: Sequence[Verdict], colours: dict[str, int]) -> SpeedChart:
    width, height, left, right, top, bottom = 430.0, 250.0, 48.0, 418.0, 14.0, 214.0
    placed = sorted(((_series(row).length, row) for row in rows), key=lambda one: one[0])
    lengths = sorted({length for length, _ in placed})
    shortest, longest = math.log2(lengths[0]), math.log2(lengths[-1])
    upward = _round_ticks(max((row.tflops or 0.0 for row in rows if row.kernel in colours), default=0.0))
    ceiling = upward[-1]

    def x(length: int) -> float:
        return left + 10 + (right - left - 20) * (math.log2(length) - shortest) / (longest - shortest)

    def y(tflops: float) -> float:
        return bottom - (bottom - top) * tflops / ceiling

    lines = []
    for kernel, colour in colours.items():
        own = [(length, row) for length, row in placed if row.kernel == kernel]
        if own:
            points = tuple(
                Point(x(length), y(row.tflops or 0.0), f"{kernel}, {row.problem}: {row.tflops:.4g} TFLOP/s")
                for length, row in own
            )
            lines.append(Line(kernel, own[0][1].origin or "peer", colour, points))
    across: list[Tick] = []
    for length in lengths:
        if not across or x(length) - across[-1].at >= _TICK_ROOM:
            across.append(Tick(x(length), str(length)))
    lines.sort(key=lambda line: line.origin != "peer")  # ours and a candidate are drawn last, over the others
    ticks = tuple(Tick(y(value), f"{value:g}") for value in upward)
    against = _series(rows[0]).axis
    return SpeedChart(title, against, width, height, left, bottom, right, top, tuple(across), ticks, tuple(lines))


def _round_ticks(most: float) -> list[float]:
    """0 and three to six round steps, the last of them at or above ``most``."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / 4
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    return [round(step * index, 12) for index in range(math.ceil(most / step - 1e-9) + 1)]
