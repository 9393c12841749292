"""Kernels that a user brought: what was promised, and what was found of each over all its problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashmoe_science.judge.formats import times
from flashmoe_science.judge.stats import Interval, call, geometric_mean
from flashmoe_science.judge.trust import in_order, is_promise
from flashmoe_science.judge.verdicts import Said, Verdict, is_brought
from flashmoe_science.records import PromiseRow, RefusalRow
from flashmoe_science.store import Run


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
