"""Geometry of the charts of ratios and of speed against length: plain numbers that the template draws.

A ratio chart is laid out by the page, so that it fits a telephone and a printed page: places are per cent of its track. A speed
chart is drawn as SVG: places are in user units.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 430.0, 250.0, 48.0, 418.0, 14.0, 214.0


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
class Point:
    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Line:
    """The speeds of one kernel; ``colour`` is a place in the template's palette."""

    kernel: str
    origin: str
    colour: int
    points: tuple[Point, ...]

    @property
    def path(self) -> str:
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)


@dataclass(frozen=True, slots=True)
class SpeedChart:
    """TFLOP/s against a length, ``against``, of problems that differ in nothing else."""

    title: str
    against: str
    across: tuple[Tick, ...]
    upward: tuple[Tick, ...]
    lines: tuple[Line, ...]
    width: float = _WIDTH
    height: float = _HEIGHT
    left: float = _LEFT
    right: float = _RIGHT
    bottom: float = _BOTTOM


def speed_charts(rows: Iterable[Verdict], colours: Mapping[str, int]) -> list[SpeedChart]:
    """A chart a family of problems that differ in nothing but their length, and in the batch where that keeps the number of
    tokens. Kernels without a colour are left out."""
    return [_speed_chart(title, members, colours) for title, members in _families([row for row in rows if row.tflops])]


def colours_of(rows: Sequence[Verdict]) -> dict[str, int]:
    """Kernel -> colour, for the kernels that charts of these rows show: users' kernels, ours, then as many peers as there are
    colours left, those first that come nearest to the front on any problem."""
    chosen = list(dict.fromkeys(row.kernel for origin in ("candidate", "ours") for row in rows if row.origin == origin))
    best: dict[tuple[str, str, str], float] = defaultdict(float)
    for row in rows:
        best[row.problem, row.clock, row.gpu] = max(best[row.problem, row.clock, row.gpu], row.tflops or 0.0)
    nearest: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.origin == "peer" and row.tflops:
            nearest[row.kernel] = max(nearest[row.kernel], row.tflops / best[row.problem, row.clock, row.gpu])
    chosen += sorted(nearest, key=lambda kernel: (-nearest[kernel], kernel))
    return {kernel: place for place, kernel in enumerate(chosen[:COLOURS])}


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


def _speed_chart(title: str, rows: Sequence[Verdict], colours: Mapping[str, int]) -> SpeedChart:
    placed = sorted(((_series(row).length, row) for row in rows), key=lambda one: one[0])
    lengths = sorted({length for length, _ in placed})
    shortest, longest = math.log2(lengths[0]), math.log2(lengths[-1])
    upward = _round_ticks(max((row.tflops or 0.0 for row in rows if row.kernel in colours), default=0.0))

    def x(length: int) -> float:
        return _LEFT + 10 + (_RIGHT - _LEFT - 20) * (math.log2(length) - shortest) / (longest - shortest)

    def y(tflops: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * tflops / upward[-1]

    lines = []
    for kernel, colour in colours.items():
        own = [(length, row) for length, row in placed if row.kernel == kernel]
        points = tuple(
            Point(x(length), y(row.tflops or 0.0), f"{kernel}, {row.problem}: {row.tflops:.4g} TFLOP/s") for length, row in own
        )
        if points:
            lines.append(Line(kernel, own[0][1].origin or "peer", colour, points))
    across: list[Tick] = []
    for length in lengths:
        if not across or x(length) - across[-1].at >= _TICK_ROOM:
            across.append(Tick(x(length), str(length)))
    lines.sort(key=lambda line: line.origin != "peer")  # peers first: the others are drawn over them
    ticks = tuple(Tick(y(value), f"{value:g}") for value in upward)
    return SpeedChart(title, _series(rows[0]).axis, tuple(across), ticks, tuple(lines))


def _round_ticks(most: float) -> list[float]:
    """0 and three to six round steps, the last of them at or above ``most``."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / 4
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    return [round(step * index, 12) for index in range(math.ceil(most / step - 1e-9) + 1)]
