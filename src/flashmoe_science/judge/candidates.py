"""Kernels that a user brought, beside ours and the peers on the same problems: what was promised, what was found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from flashmoe_science.judge.formats import times
from flashmoe_science.judge.stats import Interval, call, geometric_mean
from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.judge.verdicts import Said, Verdict, is_brought
from flashmoe_science.records import CallPathRow, Clock, CorrectnessRow, PromiseRow, RefusalRow
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
        """A verdict on all of it together."""
        if self.measured is None:
            return "refused" if self.refusals else "undecided"
        return call(self.measured)

    @property
    def headline(self) -> str:
        """What was found, in a sentence."""
        if self.measured is None:
            return (
                f"refused: {self.refusals[0]}"
                if self.refusals
                else "undecided: nothing that can be believed was timed beside it"
            )
        m = self.measured
        against = f" against {', '.join(self.rivals)}" if self.rivals else ""
        return f"{self.said}: {times(m.ratio)}{against} ({times(m.low)} to {times(m.high)})"

    @property
    def wait(self) -> str | None:
        """What a caller sees of it, who may wait for the host; None where device time is not known apart."""
        if self.waited is None:
            return None
        m = self.waited
        return f"As a caller waits: {call(m)}, {times(m.ratio)} ({times(m.low)} to {times(m.high)})."

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
            return f"{found}: {1 - self.measured.ratio / self.promised:.0%} short of its promise."
        return f"{found}: whether it keeps its promise is not decided."


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
    """What the rows of all runs say beside the verdicts."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.correctness: dict[tuple[str, str, str, str], CorrectnessRow] = {}
        self.paths: dict[tuple[str, str, str, str], CallPathRow] = {}
        self.refusals: dict[str, list[tuple[str, RefusalRow]]] = defaultdict(list)  # kernel -> GPU, row
        self.promised: dict[str, float] = {}  # kernel -> speed-up, of the latest run that says so
        for run in sorted(runs, key=lambda run: run.header.started):
            gpu = gpu_name(run.header.environment)
            for row in run.rows:
                match row:
                    case CorrectnessRow():
                        self.correctness[row.run, row.problem, row.kernel, row.config] = row
                    case CallPathRow():
                        self.paths[row.run, row.problem, row.kernel, row.config] = row
                    case PromiseRow() if row.speedup is not None:
                        self.promised[row.kernel] = row.speedup
                    case RefusalRow() if row.kernel:
                        self.refusals[row.kernel].append((gpu, row))

    def error(self, verdict: Verdict) -> str | None:
        row = self.correctness.get((verdict.run, verdict.problem, verdict.kernel, verdict.config))
        if row is None:
            return None
        if row.out.max is None:
            return f"{row.out.nonfinite} NaN or Inf"
        return f"{row.out.max:.2e} of {row.out.bound_max:.2e}"

    def launch(self, verdict: Verdict) -> str | None:
        """The launch with the most threads, and how many there are beside it."""
        row = self.paths.get((verdict.run, verdict.problem, verdict.kernel, verdict.config))
        if row is None or not row.launches:
            return None
        one = max(row.launches, key=lambda seen: _product(seen.grid) * _product(seen.block))
        blocks = _product(one.grid)
        words = (
            f"{blocks} block{'s' * (blocks != 1)} of {_product(one.block)} threads, {one.shared_bytes / 1024:.3g} KiB shared"
        )
        if one.registers is not None:
            words += f", {one.registers} registers"
        return words + (f", and {len(row.launches) - 1} more" if len(row.launches) > 1 else "")


def _candidate(name: str, own: Sequence[Verdict], judged: Sequence[Verdict], seen: _Seen) -> Candidate:
    refusals = seen.refusals.get(name, [])
    places: dict[tuple[str, str, Clock], Verdict | None] = {(row.problem, row.gpu, row.clock): row for row in own}
    spoken = {(problem, gpu) for problem, gpu, _ in places}
    for gpu, row in refusals:
        if row.problem is not None and (row.problem, gpu) not in spoken:
            places[row.problem, gpu, "eager" if gpu == "cpu" else "graph"] = None
    problems = tuple(_on_problem(name, place, verdict, judged, seen) for place, verdict in places.items())
    # Device time where there is any: what a user waits is another question.
    device = [row for row in own if row.clock == "graph"] or list(own)
    intervals = [row.interval for row in device if row.interval is not None]
    waits = [row.interval for row in own if row.clock == "eager" and row.interval is not None]
    every = [f"{row.stage}: {row.reason}" for _, row in refusals]
    every += [row.reason or "" for row in own if row.verdict == "refused"]
    return Candidate(
        name=name,
        problems=problems,
        refusals=tuple(dict.fromkeys(reason for reason in every if reason)),
        promised=seen.promised.get(name),
        measured=geometric_mean(intervals) if intervals else None,
        rivals=tuple(dict.fromkeys(row.rival for row in device if row.rival)),
        waited=geometric_mean(waits) if waits and device[0].clock == "graph" else None,
    )


def _on_problem(
    name: str, place: tuple[str, str, Clock], own: Verdict | None, judged: Sequence[Verdict], seen: _Seen
) -> OnProblem:
    problem, gpu, clock = place
    known: dict[str, Verdict] = {}
    for row in _nearest_first(judged, own):
        shown = row.kernel == name or (row.time_ns is not None and not row.brought)
        if (row.problem, row.gpu, row.clock) == place and shown:
            known.setdefault(row.kernel, row)
    rows = [
        Beside(
            verdict=row,
            share=row.time_ns / own.time_ns if own is not None and own.time_ns and row.time_ns else None,
            elsewhere=None if own is None or row.run == own.run else row.run,
            error=seen.error(row),
            launch=seen.launch(row),
        )
        for row in known.values()
    ]
    refusals = [f"{row.stage}: {row.reason}" for on, row in seen.refusals.get(name, []) if (row.problem, on) == (problem, gpu)]
    if own is not None and own.verdict == "refused" and own.reason:
        refusals.append(own.reason)
    return OnProblem(
        problem=problem,
        gpu=gpu,
        clock=clock,
        rows=tuple(sorted(rows, key=lambda row: row.verdict.time_ns or float("inf"))),
        own=own,
        refusals=tuple(dict.fromkeys(refusals)),
    )


def _nearest_first(judged: Sequence[Verdict], own: Verdict | None) -> list[Verdict]:
    """Rows of the candidate's own run, then of runs that tried nobody else's kernel."""
    others = {row.run for row in judged if row.brought}
    return sorted(judged, key=lambda row: (own is None or row.run != own.run, row.run in others))


def _product(sizes: tuple[int, int, int]) -> int:
    return sizes[0] * sizes[1] * sizes[2]
