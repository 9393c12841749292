"""Verdicts summarised: by GPU, suite, clock and cache, with the geometric mean of the ratios; and by user's kernel, with what
it promised."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from flashmoe_science.judge.formats import times
from flashmoe_science.judge.multiple_testing import named
from flashmoe_science.judge.stats import Interval, call, geometric_mean
from flashmoe_science.judge.trust import in_order, is_promise
from flashmoe_science.judge.verdicts import Said, Verdict, is_brought
from flashmoe_science.records import Cache, Clock, PromiseRow, RefusalRow
from flashmoe_science.store import Run

SAID = ("faster", "equivalent", "slower", "undecided", "refused")
_BY: dict[Clock, str] = {"graph": "by device time", "eager": "as a caller waits"}


class Group:
    """Verdicts under one set of conditions. ``front`` has one a problem: see ``front_of``.

    ``tried`` are the kernels that a user brought to its runs. ``counts`` are of the front's verdicts, each at 95% by itself;
    ``mean`` is the geometric mean of those of its ratios that there are, with its interval; None where there are none.
    """

    def __init__(self, gpu: str, suite: str, clock: Clock, cache: Cache, tried: Sequence[str], rows: Sequence[Verdict]) -> None:
        self.gpu, self.suite, self.clock, self.cache = gpu, suite, clock, cache
        self.tried, self.rows, self.front = tuple(tried), tuple(rows), tuple(front_of(rows))
        counted = Counter[str](row.verdict for row in self.front)
        self.counts = {said: counted[said] for said in SAID}
        measured = sorted((row for row in self.front if row.interval is not None), key=lambda row: row.ratio or 0.0)
        self.measured = tuple(measured)  # with a ratio, the least first
        self.intervals = [row.interval for row in measured if row.interval is not None]
        self.mean = geometric_mean(self.intervals) if self.intervals else None

    @cached_property
    def sure(self) -> dict[str, int]:
        """How many of those that say faster or slower still do when all rows with a ratio are judged together (Holm, 5% for
        the family)."""
        proven = named(self.intervals)
        return {
            "faster": sum(self.measured[place].verdict == "faster" for place in proven.above),
            "slower": sum(self.measured[place].verdict == "slower" for place in proven.below),
        }

    @property
    def corrected(self) -> str:
        """What is left of the counts when they are corrected for the number of rows, in words."""
        return (
            f"corrected for {len(self.measured)} rows (Holm): {self.sure['faster']} faster, {self.sure['slower']} slower, "
            f"{len(self.measured) - sum(self.sure.values())} not told apart"
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
    tried: dict[str, set[str]] = defaultdict(set)  # run -> kernels
    for row in rows:
        if row.brought:
            tried[row.run].add(row.kernel)
    found: dict[tuple[str, str, Clock, Cache, tuple[str, ...]], list[Verdict]] = defaultdict(list)
    for row in rows:
        found[row.gpu, row.suite, row.clock, row.cache, tuple(sorted(tried[row.run]))].append(row)
    made = [Group(*key, members) for key, members in found.items()]
    return sorted(
        made, key=lambda one: (not one.tried, one.gpu == "cpu", one.gpu, one.suite, one.tried, one.clock != "graph", one.cache)
    )


def disagreements(rows: Iterable[Verdict]) -> list[str]:
    """A sentence for each kernel and problem, within a GPU, suite and run, on which the clocks say the opposite: then neither
    alone is what to say."""
    found: dict[tuple[str, ...], dict[Clock, Verdict]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: row.cache != "cold"):
        if row.ratio is not None:
            found[row.gpu, row.suite, row.run, row.problem, row.kernel].setdefault(row.clock, row)
    sentences = []
    for one in (by_clock for by_clock in found.values() if {row.verdict for row in by_clock.values()} == {"faster", "slower"}):
        told = ", ".join(
            f"{one[clock].verdict} {by} ({times(one[clock].ratio)} of {one[clock].rival})" for clock, by in _BY.items()
        )
        sentences.append(f"{one['graph'].kernel} on {one['graph'].problem}: the clocks disagree: {told}")
    return sentences


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


@dataclass(frozen=True, slots=True)
class Candidate:
    """``measured`` is the geometric mean of its ratios to its rivals, by device time where there is one; None without any.
    ``waited`` is that by the caller's time, where there are both.

    ``promised`` is the speed-up that whoever brought it claims; None where nothing is claimed.
    """

    name: str
    refusals: tuple[str, ...]  # distinct, over all problems
    promised: float | None
    measured: Interval | None
    rivals: tuple[str, ...]
    waited: Interval | None = None

    @property
    def refused(self) -> bool:
        """Whether nothing of it could be given a number."""
        return self.measured is None and bool(self.refusals)

    @property
    def said(self) -> Said:
        """A verdict on all of it together; undecided where the clocks say the opposite of each other."""
        if self.measured is None:
            return "refused" if self.refusals else "undecided"
        disagree = self.waited is not None and {call(self.measured), call(self.waited)} == {"faster", "slower"}
        return "undecided" if disagree else call(self.measured)

    @property
    def headline(self) -> str:
        """What was found, in a sentence; on both clocks, where device time is known apart from what a caller waits."""
        if self.measured is None:
            return f"{self.said}: {self.refusals[0] if self.refusals else 'nothing that can be believed was timed beside it'}"
        device = f"{_with_range(self.measured)} against {', '.join(self.rivals)}"
        if self.waited is None:
            return f"{self.said}: {device}"
        clocks = (
            f"by device time {call(self.measured)}, {device}; as a caller waits {call(self.waited)}, {_with_range(self.waited)}"
        )
        return f"{'the clocks disagree' if self.said != call(self.measured) else self.said}: {clocks}"

    @property
    def promise(self) -> str | None:
        """The claim beside what was measured; None where nothing is claimed."""
        if self.promised is None:
            return None
        if self.measured is None:
            return f"It promised {times(self.promised)}. No number can be given, so nothing is left of the promise."
        found = f"It promised {times(self.promised)} and measured {times(self.measured.ratio)}"
        if self.measured.low >= self.promised:
            return f"{found}: it kept its promise."
        if self.measured.high < self.promised:
            return f"{found}: promise broken."
        return f"{found}: whether it keeps its promise is not decided."


def _with_range(measured: Interval) -> str:
    return f"{times(measured.ratio)} ({times(measured.low)} to {times(measured.high)})"


def candidates(runs: Sequence[Run], judged: Sequence[Verdict]) -> list[Candidate]:
    """Every kernel that a user brought, in the order of the records; those that were refused first."""
    refusals: dict[str, list[RefusalRow]] = defaultdict(list)
    promised: dict[str, float] = {}  # of the latest run that says so
    for run in sorted(runs, key=lambda run: (run.header.started, run.header.run)):
        for row in run.rows:
            if isinstance(row, PromiseRow) and row.speedup is not None:
                promised[row.kernel] = row.speedup
            elif isinstance(row, RefusalRow) and row.kernel and not is_promise(row):
                refusals[row.kernel].append(row)
    by_name: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in judged:
        if verdict.brought:
            by_name[verdict.kernel].append(verdict)
    for name in refusals:
        if is_brought(name, None):
            by_name.setdefault(name, [])
    found = [_candidate(name, rows, refusals.get(name, ()), promised.get(name)) for name, rows in by_name.items()]
    return sorted(found, key=lambda one: not one.refused)


def _candidate(name: str, own: Sequence[Verdict], refusals: Iterable[RefusalRow], promised: float | None) -> Candidate:
    # Device time where there is any: what a user waits is another question.
    device = [row for row in own if row.clock == "graph"] or list(own)
    intervals = [row.interval for row in device if row.interval is not None]
    waits = [row.interval for row in own if row.clock == "eager" and row.interval is not None]
    # The cause, which is the earliest stage, comes first.
    reasons = [f"{row.stage}: {row.reason}" for row in in_order(refusals)]
    reasons += [row.reason for row in own if row.verdict == "refused" and row.reason]
    return Candidate(
        name=name,
        refusals=tuple(dict.fromkeys(reasons)),
        promised=promised,
        measured=geometric_mean(intervals) if intervals else None,
        rivals=tuple(dict.fromkeys(row.rival for row in device if row.rival)),
        waited=geometric_mean(waits) if waits and device[0].clock == "graph" else None,
    )
