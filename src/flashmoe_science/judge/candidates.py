"""Kernels that a user brought, beside ours and the peers on the same problems: what was promised, what was found."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_science.judge.formats import times
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.judge.stats import Interval, call, geometric_mean
from flashmoe_science.judge.trust import in_order, is_promise
from flashmoe_science.judge.verdicts import Said, Verdict, is_brought
from flashmoe_science.records import Clock, CorrectnessRow, PromiseRow, RefusalRow, SeenLaunch
from flashmoe_science.store import Run


@dataclass(frozen=True, slots=True)
class Beside:
    """One kernel on a candidate's problem. ``share`` is its time over the candidate's: 0.1 takes a tenth of the time.

    ``elsewhere`` names the run where it was not the candidate's: then the two were not sampled in pairs.
    """

    verdict: Verdict
    share: float | None
    elsewhere: str | None
    error: str | None  # the largest error against the oracle, and what is allowed
    launch: str | None


@dataclass(frozen=True, slots=True)
class OnProblem:
    """A candidate on one problem, GPU and clock. ``rows`` are the kernels known there, the fastest first, the candidate among
    them; ``refusals`` are why it has no number."""

    problem: str
    gpu: str
    clock: Clock
    rows: tuple[Beside, ...]
    own: Verdict | None
    refusals: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """``measured`` is the geometric mean of its ratios to its rivals, by device time where there is one; None without any.
    ``waited`` is that by the caller's time, where there are both.

    ``promised`` is the speed-up that whoever brought it claims; None where nothing is claimed.
    """

    name: str
    problems: tuple[OnProblem, ...]
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
        return "undecided" if self._clocks_disagree else call(self.measured)

    @property
    def _clocks_disagree(self) -> bool:
        both = {call(one) for one in (self.measured, self.waited) if one is not None}
        return both == {"faster", "slower"}

    @property
    def headline(self) -> str:
        """What was found, in a sentence."""
        if self.measured is None:
            nothing = "undecided: nothing that can be believed was timed beside it"
            return f"refused: {self.refusals[0]}" if self.refusals else nothing
        against = f" against {', '.join(self.rivals)}" if self.rivals else ""
        device = f"{call(self.measured)}: {_with_range(self.measured, against)}"
        if self.waited is None or not self._clocks_disagree:
            return device
        return (
            f"the clocks disagree: by device time {device}; as a caller waits {call(self.waited)}: {_with_range(self.waited)}"
        )

    @property
    def wait(self) -> str | None:
        """What a caller sees of it, who may wait for the host; None where device time is not known apart."""
        return None if self.waited is None else f"As a caller waits: {call(self.waited)}, {_with_range(self.waited)}."

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


def _with_range(measured: Interval, against: str = "") -> str:
    return f"{times(measured.ratio)}{against} ({times(measured.low)} to {times(measured.high)})"


def candidates(runs: Sequence[Run], judged: Sequence[Verdict]) -> list[Candidate]:
    """Every kernel that a user brought, in the order of the records; those that were refused first."""
    seen = _Seen(runs)
    by_name: dict[str, list[Verdict]] = defaultdict(list)
    for row in judged:
        if row.brought:
            by_name[row.kernel].append(row)
    for name in seen.refusals:
        if is_brought(name, None):
            by_name.setdefault(name, [])
    found = [_candidate(name, rows, judged, seen) for name, rows in by_name.items()]
    return sorted(found, key=lambda one: not one.refused)


class _Seen:
    """What the rows of all runs say beside the verdicts: refusals by kernel, with their GPU, and the latest run's promises."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = {run.header.run: JudgedRun(run) for run in runs}
        self.refusals: dict[str, list[tuple[str, RefusalRow]]] = defaultdict(list)
        self.promised: dict[str, float] = {}
        for one in sorted(self.runs.values(), key=lambda one: one.age):
            for row in one.run.rows:
                if isinstance(row, PromiseRow) and row.speedup is not None:
                    self.promised[row.kernel] = row.speedup
                elif isinstance(row, RefusalRow) and row.kernel and not is_promise(row):
                    self.refusals[row.kernel].append((one.trust.gpu_name, row))

    def reasons(self, name: str, place: tuple[str, str] | None = None) -> list[str]:
        """Why a kernel was refused, anywhere or on a problem and GPU: the cause, which is the earliest stage, first."""
        rows = [row for gpu, row in self.refusals.get(name, ()) if place in (None, (row.problem, gpu))]
        return [f"{row.stage}: {row.reason}" for row in in_order(rows)]


def _candidate(name: str, own: Sequence[Verdict], judged: Sequence[Verdict], seen: _Seen) -> Candidate:
    places: dict[tuple[str, str, Clock], Verdict | None] = {(row.problem, row.gpu, row.clock): row for row in own}
    spoken = {(problem, gpu) for problem, gpu, _ in places}
    for gpu, row in seen.refusals.get(name, ()):
        if row.problem is not None and (row.problem, gpu) not in spoken:
            places[row.problem, gpu, "eager" if gpu == "cpu" else "graph"] = None
    # Device time where there is any: what a user waits is another question.
    device = [row for row in own if row.clock == "graph"] or list(own)
    intervals = [row.interval for row in device if row.interval is not None]
    waits = [row.interval for row in own if row.clock == "eager" and row.interval is not None]
    every = seen.reasons(name) + [row.reason for row in own if row.verdict == "refused" and row.reason]
    return Candidate(
        name=name,
        problems=tuple(_on_problem(name, place, verdict, judged, seen) for place, verdict in places.items()),
        refusals=tuple(dict.fromkeys(every)),
        promised=seen.promised.get(name),
        measured=geometric_mean(intervals) if intervals else None,
        rivals=tuple(dict.fromkeys(row.rival for row in device if row.rival)),
        waited=geometric_mean(waits) if waits and device[0].clock == "graph" else None,
    )


def _on_problem(
    name: str, place: tuple[str, str, Clock], own: Verdict | None, judged: Sequence[Verdict], seen: _Seen
) -> OnProblem:
    problem, gpu, clock = place
    with_users = {row.run for row in judged if row.brought}
    here = [row for row in judged if (row.problem, row.gpu, row.clock) == place]
    known: dict[str, Verdict] = {}
    # Rows of the candidate's own run, then of runs that tried nobody else's kernel.
    for row in sorted(here, key=lambda row: (own is None or row.run != own.run, row.run in with_users)):
        if row.kernel == name or (row.time_ns is not None and not row.brought):
            known.setdefault(row.kernel, row)
    rows = [
        Beside(
            verdict=row,
            share=row.time_ns / own.time_ns if own is not None and own.time_ns and row.time_ns else None,
            elsewhere=None if own is None or row.run == own.run else row.run,
            error=_error_in_words(seen.runs[row.run].error(row)),
            launch=_launch_in_words(seen.runs[row.run].launches(row)),
        )
        for row in known.values()
    ]
    refusals = seen.reasons(name, (problem, gpu))
    if own is not None and own.verdict == "refused" and own.reason:
        refusals.append(own.reason)
    ordered = sorted(rows, key=lambda row: row.verdict.time_ns or math.inf)
    return OnProblem(problem, gpu, clock, tuple(ordered), own, tuple(dict.fromkeys(refusals)))


def _error_in_words(row: CorrectnessRow | None) -> str | None:
    if row is None:
        return None
    return f"{row.out.nonfinite} NaN or Inf" if row.out.max is None else f"{row.out.max:.2e} of {row.out.bound_max:.2e}"


def _launch_in_words(launches: Sequence[SeenLaunch]) -> str | None:
    """The launch with the most threads, and how many there are beside it."""
    if not launches:
        return None
    one = max(launches, key=lambda seen: math.prod(seen.grid) * math.prod(seen.block))
    blocks = math.prod(one.grid)
    words = f"{blocks} block{'s' * (blocks != 1)} of {math.prod(one.block)} threads, {one.shared_bytes / 1024:.3g} KiB shared"
    if one.registers is not None:
        words += f", {one.registers} registers"
    return words + (f", and {len(launches) - 1} more" if len(launches) > 1 else "")
