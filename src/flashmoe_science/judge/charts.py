"""Geometry of the report's charts: plain numbers that the template draws as SVG. Lengths are in SVG user units."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flashmoe_science.judge.verdict import Verdict
from flashmoe_science.problem import AttentionProblem, as_attention, parse_problem

_RATIO_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 8, 12, 20, 50)
_TICK_ROOM = 34.0
_MOST_PEERS = 6  # lines in one speed chart beside ours; more cannot be told apart


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class RatioRow:
    """One problem: where its ratio's dot and interval lie, or None where it has no number."""

    label: str
    y: float
    verdict: str
    told: str
    title: str
    dot: float | None
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class RatioChart:
    width: float
    height: float
    left: float
    right: float
    one: float  # where the ratio is 1
    ticks: tuple[Tick, ...]
    rows: tuple[RatioRow, ...]


def ratio_chart(rows: Sequence[Verdict]) -> RatioChart:
    """A row a problem, on a logarithmic axis on which 2 and 1/2 are as far from 1."""
    left, right, width, step, top = 310.0, 720.0, 900.0, 20.0, 26.0
    bounds = [bound for row in rows if row.low and row.high for bound in (row.low, row.high)]
    least, most = min([0.9, *bounds]), max([1.1, *bounds])
    span = math.log(most / least) * 1.04

    def x(ratio: float) -> float:
        return left + (right - left) * (math.log(ratio / least) / span + 0.02)

    drawn = [_ratio_row(row, x, top + step * (index + 0.5)) for index, row in enumerate(rows)]
    ticks: list[Tick] = []
    for tick in sorted((t for t in _RATIO_TICKS if least <= t <= most), key=lambda t: abs(math.log(t))):  # 1 first: it stays
        if all(abs(x(tick) - other.at) >= _TICK_ROOM for other in ticks):
            ticks.append(Tick(x(tick), f"{tick:g}x"))
    return RatioChart(width, top + step * len(rows) + 8, left, right, x(1.0), tuple(ticks), tuple(drawn))


def _ratio_row(row: Verdict, x: Callable[[float], float], y: float) -> RatioRow:
    if row.ratio is None or row.low is None or row.high is None:
        return RatioRow(row.problem, y, row.verdict, row.verdict, f"{row.problem}: {row.verdict}, {row.reason}", None, 0, 0)
    told = f"{row.ratio:.2f}x {row.rival}"
    title = f"{row.problem}: {row.kernel} against {row.rival}, {row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}], {row.verdict}"
    dot, low, high = (x(value) for value in (row.ratio, row.low, row.high))
    return RatioRow(row.problem, y, row.verdict, told, title, dot, low, high)


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class Line:
    kernel: str
    ours: bool
    colour: int  # place in the report's palette
    points: tuple[Point, ...]

    @property
    def path(self) -> str:
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)


@dataclass(frozen=True, slots=True)
class SpeedChart:
    title: str
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
    """Kernels that speed charts show: ours, then the peers that are most often near the front."""
    ours = list(dict.fromkeys(row.kernel for row in rows if row.origin == "ours"))
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
    """Groups of at least three lengths: first those of one batch, then, of the rest, those of one number of tokens."""
    left = [row for row in rows if (p := _attention(row)) is not None and p.seqlen_q == p.seqlen_k]
    found: list[tuple[str, list[Verdict]]] = []
    for same_batch in (True, False):
        groups: dict[tuple[str, ...], list[Verdict]] = defaultdict(list)
        for row in left:
            groups[_family(row, same_batch)].append(row)
        full = {key: group for key, group in groups.items() if len({row.problem for row in group}) >= 3}
        found += [(", ".join(word for word in key if word), group) for key, group in full.items()]
        left = [row for row in left if _family(row, same_batch) not in full]
    return found


def _attention(row: Verdict) -> AttentionProblem | None:
    problem = parse_problem(row.problem)
    return problem if isinstance(problem, AttentionProblem) else None


def _length(row: Verdict) -> int:
    return as_attention(parse_problem(row.problem)).seqlen_q


def _family(row: Verdict, same_batch: bool) -> tuple[str, ...]:
    p = as_attention(parse_problem(row.problem))
    heads = f"{p.heads} heads" if p.heads > 1 else "1 head"
    if p.heads_kv != p.heads:
        heads += f" ({p.heads_kv} of keys)"
    size = f"batch {p.batch}" if same_batch else f"{p.batch * p.seqlen_q} tokens"
    dim = f"D {p.head_dim}" if p.head_dim == p.head_dim_v else f"D {p.head_dim} and {p.head_dim_v}"
    return (dim, p.dtype, p.mask, size, heads, "" if p.layout == "bhsd" else p.layout, row.gpu)


def _speed_chart(title: str, rows: Sequence[Verdict], colours: dict[str, int]) -> SpeedChart:
    width, height, left, right, top, bottom = 430.0, 250.0, 48.0, 418.0, 14.0, 214.0
    lengths = sorted({_length(row) for row in rows})
    shortest, longest = math.log2(lengths[0]), math.log2(lengths[-1])
    upward = _round_ticks(max(row.tflops or 0.0 for row in rows if row.kernel in colours))
    ceiling = upward[-1]

    def x(length: int) -> float:
        return left + 10 + (right - left - 20) * (math.log2(length) - shortest) / (longest - shortest)

    def y(tflops: float) -> float:
        return bottom - (bottom - top) * tflops / ceiling

    lines = []
    for kernel, colour in colours.items():
        own = sorted((row for row in rows if row.kernel == kernel), key=_length)
        if own:
            points = tuple(
                Point(
                    x(_length(row)),
                    y(row.tflops or 0.0),
                    f"{kernel}, {row.problem}: {row.tflops:.4g} TFLOP/s",
                )
                for row in own
            )
            lines.append(Line(kernel, own[0].origin == "ours", colour, points))
    across: list[Tick] = []
    for length in lengths:
        if not across or x(length) - across[-1].at >= _TICK_ROOM:
            across.append(Tick(x(length), str(length)))
    lines.sort(key=lambda line: line.ours)  # ours are drawn last, over the others
    ticks = tuple(Tick(y(value), f"{value:g}") for value in upward)
    return SpeedChart(title, width, height, left, bottom, right, top, tuple(across), ticks, tuple(lines))


def _round_ticks(most: float) -> list[float]:
    """0 and three to six round steps, the last of them at or above ``most``."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / 4
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    return [round(step * index, 12) for index in range(math.ceil(most / step - 1e-9) + 1)]
