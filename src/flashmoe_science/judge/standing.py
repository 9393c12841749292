"""Which run counts for a place: the one rule by which verdicts, the table, claims, ratchet and comparisons choose among runs.

A full run counts before a quick one, a run that finished the problem before one that did not, a later run before an earlier
one; no run is chosen by its numbers. What a place is depends on the question: verdicts are kept by GPU, suite and problem, the
dispatch table by GPU and problem. Where one problem has several current verdicts (of several suites, or with a user's kernel
compared with ours), ``eligible`` picks those that count for a claim, and the claim is judged by the worst of these.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from flashmoe_science.judge.comparison import Comparison, comparisons
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.trust import Trust, Who
from flashmoe_science.judge.verdicts import Verdict, verdicts_of
from flashmoe_science.records import CallPathRow, CorrectnessRow, RefusalRow, SeenLaunch, TimingRow
from flashmoe_science.store import Run

Place = TypeVar("Place", bound=Hashable)
Row = TypeVar("Row", CorrectnessRow, CallPathRow)

_DRAWN = "-draw"  # suffix of a suite whose problems were drawn at random around another suite


class JudgedRun:
    """One run with its verdicts and comparisons, each computed on first use."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def trust(self) -> Trust:
        return Trust(self.run)

    @cached_property
    def comparisons(self) -> list[Comparison]:
        return comparisons(self.trust)

    @cached_property
    def believed(self) -> list[Comparison]:
        """The trusted comparisons, from both sides."""
        return [one for one in self.comparisons if one.believed]

    @cached_property
    def verdicts(self) -> list[Verdict]:
        return verdicts_of(self.trust, self.comparisons)

    @cached_property
    def brought(self) -> tuple[str, ...]:
        """The names of the users' kernels that the run measured."""
        return tuple(sorted({verdict.kernel for verdict in self.verdicts if verdict.brought}))

    @cached_property
    def kernels(self) -> frozenset[str]:
        """Every kernel that a row names, one that was refused before it could be timed included."""
        rows = (row for row in self.run.rows if isinstance(row, TimingRow | CorrectnessRow | RefusalRow))
        return frozenset(name for row in rows for name in (row.kernel, getattr(row, "rival", None)) if name)

    def comparisons_of(self, verdict: Verdict) -> list[Comparison]:
        """The trusted comparisons of the verdict's kernel, with its config and under its conditions."""
        return [one for one in self.believed if _conditions(one) == _conditions(verdict)]

    def error(self, verdict: Verdict) -> CorrectnessRow | None:
        """The correctness row of a verdict's kernel and config, of several a failed one; None without a row."""
        return min(_rows_of(self.trust.oracle, verdict), key=lambda row: row.passed, default=None)

    def launches(self, verdict: Verdict) -> list[SeenLaunch]:
        """The launches of one call of the verdict's kernel."""
        return next((row.launches for row in _rows_of(self.trust.paths, verdict)), [])


def _rows_of(rows: Mapping[Who, Row], verdict: Verdict) -> list[Row]:
    """The rows of a verdict's kernel and config, or of every config where the verdict names none."""
    about = (verdict.problem, verdict.kernel)
    return [row for (*who, config), row in rows.items() if tuple(who) == about and verdict.config in ("", config)]


def standing(runs: Iterable[JudgedRun]) -> list[Verdict]:
    """The current verdicts: of each problem on a GPU in a suite, those of the run that counts (``precedence``). A run with a
    user's kernel replaces only runs with the same. In the order of GPU, suite, run, then of the run's own verdicts. Raises
    ProblemError: a record's problem does not parse."""
    ordered = sorted(runs, key=lambda one: one.run.age)
    brought = {one.run.header.run: one.brought for one in ordered}

    def place(row: Verdict) -> tuple[str, str, str, tuple[str, ...]]:
        return row.gpu, row.suite, row.problem, brought[row.run]

    every = [verdict for one in ordered for verdict in one.verdicts]
    counts = latest(every, place)
    stand = [row for row in every if row.run == counts[place(row)].run]
    return sorted(stand, key=lambda row: (row.gpu, row.suite))


def precedence(row: Verdict) -> tuple[bool, bool, str, str, bool, float]:
    """A sort key, whose greatest verdict counts: of a full run, of a run that finished the problem, of the later run; within
    a run of the cold cache, then of the least time."""
    return not row.quick, not row.unfinished, row.started, row.run, row.cache == "cold", -(row.time_ns or 0.0)


def latest(rows: Iterable[Verdict], place: Callable[[Verdict], Place]) -> dict[Place, Verdict]:
    """The verdict that counts for each place, also where it is a refusal."""
    return {key: max(members, key=precedence) for key, members in grouped(rows, place).items()}


def eligible(rows: Sequence[Verdict], is_asked: Callable[[Verdict], bool]) -> list[list[Verdict]]:
    """One problem's current verdicts by run, of the runs that count for the kernels that ``is_asked`` picks: where there are
    such, only verdicts of the cold cache, only runs without a user's kernel, only full runs."""
    with_users = {row.run for row in rows if row.brought}
    for is_preferred in (lambda row: row.cache == "cold", lambda row: row.run not in with_users, lambda row: not row.quick):
        left = [row for row in rows if is_preferred(row)]
        rows = left if any(map(is_asked, left)) else rows
    return list(grouped(rows, lambda row: row.run).values())


def is_drawn(suite: str) -> bool:
    """Whether a suite's problems were drawn at random around another suite. The next draw has other problems."""
    return suite.endswith(_DRAWN)


def _conditions(one: Verdict | Comparison) -> tuple[str, ...]:
    return one.problem, one.clock, one.cache, one.kernel, one.config
