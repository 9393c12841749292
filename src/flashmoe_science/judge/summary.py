"""What a report says first: for each GPU, suite and clock, how many of our problems are won, and by how much."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashmoe_science.judge.stats import Interval, geometric_mean
from flashmoe_science.judge.verdict import Verdict
from flashmoe_science.records import Cache, Clock

SAID = ("faster", "equivalent", "slower", "undecided", "refused")


@dataclass(frozen=True, slots=True)
class Group:
    """Verdicts under one set of conditions. ``front`` has one a problem: the fastest of ours, or of all in a run without ours.

    ``mean`` is the geometric mean of the front's ratios that there are, with its interval; None where there are none.
    """

    gpu: str
    suite: str
    clock: Clock
    cache: Cache
    rows: tuple[Verdict, ...]
    front: tuple[Verdict, ...]
    counts: dict[str, int]
    mean: Interval | None
    least: Verdict | None
    most: Verdict | None

    @property
    def title(self) -> str:
        return f"{self.suite} on {self.gpu}, {self.clock} clock, {self.cache} cache"

    @property
    def anchor(self) -> str:
        return f"{self.gpu}-{self.suite}-{self.clock}-{self.cache}"


def groups(verdicts: Iterable[Verdict]) -> list[Group]:
    """Verdicts by gpu, suite, clock and cache; the graph clock, which is the kernels' own time, before the eager one."""
    found: dict[tuple[str, str, Clock, Cache], list[Verdict]] = defaultdict(list)
    for row in verdicts:
        found[row.gpu, row.suite, row.clock, row.cache].append(row)
    ordered = sorted(found.items(), key=lambda item: (item[0][0] == "cpu", item[0][:2], item[0][2] != "graph", item[0][3]))
    return [_group(key, rows) for key, rows in ordered]


def _group(key: tuple[str, str, Clock, Cache], rows: Sequence[Verdict]) -> Group:
    gpu, suite, clock, cache = key
    front = front_of(rows)
    measured = sorted((row for row in front if row.interval is not None), key=lambda row: row.ratio or 0.0)
    intervals = [row.interval for row in measured if row.interval is not None]
    counts = Counter(row.verdict for row in front)
    return Group(
        gpu=gpu,
        suite=suite,
        clock=clock,
        cache=cache,
        rows=tuple(rows),
        front=tuple(front),
        counts={said: counts[said] for said in SAID},  # type: ignore[index]  # SAID spells the verdicts
        mean=geometric_mean(intervals) if intervals else None,
        least=measured[0] if measured else None,
        most=measured[-1] if measured else None,
    )


def front_of(rows: Sequence[Verdict]) -> list[Verdict]:
    """One verdict a problem, in the order of the rows: of ours where there are any, the fastest that has a number."""
    ours = [row for row in rows if row.origin == "ours"]
    best: dict[str, Verdict] = {}
    for row in ours or rows:
        if row.problem not in best or _rank(row) < _rank(best[row.problem]):
            best[row.problem] = row
    return list(best.values())


def _rank(row: Verdict) -> tuple[bool, float]:
    return (row.ratio is None, float("inf") if row.time_ns is None else row.time_ns)
