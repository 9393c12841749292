"""Verdicts summarised by GPU, suite, clock and cache: counts, and the geometric mean of the ratios."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashmoe_science.judge.multiple_testing import named
from flashmoe_science.judge.stats import Interval, geometric_mean
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import Cache, Clock

_Key = tuple[str, str, Clock, Cache, tuple[str, ...]]  # gpu, suite, clock, cache, users' kernels

SAID = ("faster", "equivalent", "slower", "undecided", "refused")


@dataclass(frozen=True, slots=True)
class Group:
    """Verdicts under one set of conditions. ``front`` has one a problem: see ``front_of``.

    ``tried`` are the kernels that a user brought to its runs.
    ``mean`` is the geometric mean of the front's ratios that there are, with its interval; None where there are none.
    ``counts`` are of the front's verdicts, each at 95% by itself; ``sure`` are how many of those that say faster or slower
    still do when all ``compared`` rows with a ratio are judged together (Holm, 5% for the family).
    """

    gpu: str
    suite: str
    clock: Clock
    cache: Cache
    tried: tuple[str, ...]
    rows: tuple[Verdict, ...]
    front: tuple[Verdict, ...]
    counts: dict[str, int]
    mean: Interval | None
    least: Verdict | None
    most: Verdict | None
    compared: int
    sure: dict[str, int]

    @property
    def corrected(self) -> str:
        """What is left of the counts when they are corrected for the number of rows, in words."""
        return (
            f"corrected for {self.compared} rows (Holm): {self.sure['faster']} faster, {self.sure['slower']} slower, "
            f"{self.compared - sum(self.sure.values())} not told apart"
        )

    @property
    def title(self) -> str:
        whose = f"{', '.join(self.tried)}: " if self.tried else ""
        return f"{whose}{self.suite} on {self.gpu}, {self.clock} clock, {self.cache} cache"

    @property
    def anchor(self) -> str:
        return "-".join((self.gpu, self.suite, self.clock, self.cache, *self.tried))


def groups(verdicts: Iterable[Verdict]) -> list[Group]:
    """Verdicts by gpu, suite, clock, cache and the users' kernels; groups with users' kernels first, then the graph
    clock, which is the kernels' own time, before the eager one."""
    rows = list(verdicts)
    tried: dict[str, dict[str, None]] = defaultdict(dict)  # run -> kernels
    for row in rows:
        if row.brought:
            tried[row.run][row.kernel] = None
    found: dict[_Key, list[Verdict]] = defaultdict(list)
    for row in rows:
        found[row.gpu, row.suite, row.clock, row.cache, tuple(sorted(tried.get(row.run, ())))].append(row)
    return [_group(key, members) for key, members in sorted(found.items(), key=lambda item: _place(item[0]))]


def _place(key: _Key) -> tuple[object, ...]:
    gpu, suite, clock, cache, tried = key
    return (not tried, gpu == "cpu", gpu, suite, tried, clock != "graph", cache)


def _group(key: _Key, rows: Sequence[Verdict]) -> Group:
    gpu, suite, clock, cache, tried = key
    front = front_of(rows)
    measured = sorted((row for row in front if row.interval is not None), key=lambda row: row.ratio or 0.0)
    intervals = [row.interval for row in measured if row.interval is not None]
    proven = named(intervals)
    counts = Counter(row.verdict for row in front)
    return Group(
        gpu=gpu,
        suite=suite,
        clock=clock,
        cache=cache,
        tried=tried,
        rows=tuple(rows),
        front=tuple(front),
        counts={said: counts[said] for said in SAID},  # type: ignore[index]  # SAID spells the verdicts
        mean=geometric_mean(intervals) if intervals else None,
        least=measured[0] if measured else None,
        most=measured[-1] if measured else None,
        compared=len(measured),
        sure={
            "faster": sum(measured[place].verdict == "faster" for place in proven.above),
            "slower": sum(measured[place].verdict == "slower" for place in proven.below),
        },
    )


def front_of(rows: Sequence[Verdict]) -> list[Verdict]:
    """One verdict a problem, in the order of the rows: of the kernels in question, the fastest that has a number.

    In question are the kernels that a user brought, else ours where there are any, else all.
    """
    brought = {row.problem for row in rows if row.brought}
    ours = [row for row in rows if row.origin == "ours"]
    best: dict[str, Verdict] = {}
    for row in rows:
        in_question = row.brought if row.problem in brought else row.origin == "ours" or not ours
        if in_question and (row.problem not in best or _rank(row) < _rank(best[row.problem])):
            best[row.problem] = row
    return list(best.values())


def _rank(row: Verdict) -> tuple[bool, float]:
    return (row.ratio is None, float("inf") if row.time_ns is None else row.time_ns)
