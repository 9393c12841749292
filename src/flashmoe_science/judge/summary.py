"""Summaries of verdicts: by GPU, suite, clock and cache, with the geometric mean of the ratios; and by user's kernel, with its
promised speed-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from flashmoe_science.judge.formats import times
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.multiple_testing import named
from flashmoe_science.judge.stats import Interval, call, geometric_mean
from flashmoe_science.judge.trust import in_order, is_promise
from flashmoe_science.judge.verdicts import Judgement, Verdict, is_brought
from flashmoe_science.records import Cache, Clock, PromiseRow, RefusalRow
from flashmoe_science.store import Run

NAMED = "custom"  # the suite of a run whose problems were named one by one
JUDGEMENTS = ("faster", "equivalent", "slower", "undecided", "refused")
_BY: dict[Clock, str] = {"graph": "by device time", "eager": "by end-to-end latency"}


def counts_in_words(counts: Mapping[str, int]) -> str:
    """The number of each verdict as text: "8 faster, 4 equivalent"."""
    return ", ".join(f"{counts[word]} {word}" for word in JUDGEMENTS if counts[word])


class Group:
    """Verdicts under one set of conditions. ``front`` has one verdict for each problem: see ``front_of``.

    ``tried`` are the users' kernels in its runs. ``counts`` are of the front's verdicts, each at 95% by itself. ``mean`` is the
    geometric mean of the front's ratios, with its interval; None where none has a ratio.
    """

    def __init__(self, gpu: str, suite: str, clock: Clock, cache: Cache, tried: Sequence[str], rows: Sequence[Verdict]) -> None:
        self.gpu, self.suite, self.clock, self.cache = gpu, suite, clock, cache
        self.tried, self.rows, self.front = tuple(tried), tuple(rows), tuple(front_of(rows))
        counted = Counter[str](row.verdict for row in self.front)
        self.counts = {verdict: counted[verdict] for verdict in JUDGEMENTS}
        # Those of the front that have a ratio, the least first.
        self.measured = sorted((row for row in self.front if row.interval is not None), key=lambda row: row.ratio or 0.0)
        self.intervals = [row.interval for row in self.measured if row.interval is not None]
        self.mean = geometric_mean(self.intervals) if self.intervals else None

    @cached_property
    def sure(self) -> dict[str, int]:
        """How many of the faster and slower verdicts remain when all rows with a ratio are judged together (Holm, 5% for
        the family)."""
        above, below = ([self.measured[place].verdict for place in places] for places in named(self.intervals))
        return {"faster": above.count("faster"), "slower": below.count("slower")}

    @property
    def corrected(self) -> str:
        """The counts corrected for the number of rows, in words."""
        faster, slower = self.sure.values()
        left = len(self.measured) - faster - slower
        return f"corrected for {len(self.measured)} rows (Holm): {faster} faster, {slower} slower, {left} not told apart"

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
    brought = grouped((row for row in rows if row.brought), lambda row: row.run)
    tried = {run: tuple(sorted({row.kernel for row in own})) for run, own in brought.items()}
    found = grouped(rows, lambda row: (row.gpu, row.suite, row.clock, row.cache, tried.get(row.run, ())))
    made = [Group(*key, members) for key, members in found.items()]
    return sorted(
        made, key=lambda one: (not one.tried, one.gpu == "cpu", one.gpu, one.suite, one.tried, one.clock != "graph", one.cache)
    )


def disagreements(rows: Iterable[Verdict]) -> list[str]:
    """A sentence for each kernel and problem, within a GPU, suite and run, with one clock faster and the other slower: neither
    clock alone is the result."""
    cold_first = sorted((row for row in rows if row.ratio is not None), key=lambda row: row.cache != "cold")
    sentences = []
    for own in grouped(cold_first, lambda row: (row.gpu, row.suite, row.run, row.problem, row.kernel)).values():
        by_clock = {row.clock: row for row in reversed(own)}  # the cold one, where there are both
        if {row.verdict for row in by_clock.values()} == {"faster", "slower"}:
            found = ((by_clock[clock], by) for clock, by in _BY.items())
            words = ", ".join(f"{row.verdict} {by} ({times(row.ratio)} of {row.rival})" for row, by in found)
            sentences.append(f"{own[0].kernel} on {own[0].problem}: the clocks disagree: {words}")
    return sentences


def in_question(rows: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts on the kernels that a user brought to a problem, else on our kernels, else all."""
    brought = {row.problem for row in rows if row.brought}
    ours = any(row.origin == "ours" for row in rows)
    return [row for row in rows if (row.brought if row.problem in brought else row.origin == "ours" or not ours)]


def front_of(rows: Sequence[Verdict]) -> list[Verdict]:
    """The verdict on the fastest kernel in question that has a number, for each problem in the order of the rows."""
    return [min(own, key=_rank) for own in grouped(in_question(rows), lambda row: row.problem).values()]


def of_suites(rows: Sequence[Verdict]) -> list[Verdict]:
    """The rows of suites, which are samples of use; all rows where there are none. Losses are counted over these rows: problems
    named one by one are experiments, often with a kernel that is gone."""
    return [row for row in rows if row.suite != NAMED] or list(rows)


def _rank(row: Verdict) -> tuple[bool, float]:
    return (row.ratio is None, float("inf") if row.time_ns is None else row.time_ns)


class Candidate(NamedTuple):
    """A user's kernel. ``verdict`` is over all problems together, ``headline`` the result in a sentence. ``refusals`` are the
    distinct reasons, over all problems. ``promise`` compares the promised speed-up with the measured one; None without one."""

    name: str
    verdict: Judgement
    headline: str
    refusals: tuple[str, ...]
    promise: str | None


def candidates(runs: Sequence[Run], judged: Sequence[Verdict]) -> list[Candidate]:
    """Every kernel that a user brought, in the order of the records; those that were refused first."""
    ordered = sorted(runs, key=lambda run: run.age)  # of several promises the latest counts
    promised = {row.kernel: row.speedup for run in ordered for row in run.of(PromiseRow) if row.speedup is not None}
    refused = (row for run in ordered for row in run.of(RefusalRow) if not is_promise(row))
    refusals = grouped(refused, lambda row: row.kernel or "")
    own = grouped((row for row in judged if row.brought), lambda row: row.kernel)
    names = dict.fromkeys([*own, *(name for name in refusals if is_brought(name, None))])
    found = [_candidate(name, own.get(name, ()), refusals.get(name, ()), promised.get(name)) for name in names]
    return sorted(found, key=lambda one: one.verdict != "refused")


def _candidate(name: str, own: Sequence[Verdict], refusals: Iterable[RefusalRow], promised: float | None) -> Candidate:
    # The cause, which is the earliest stage, comes first.
    reasons = [f"{row.stage}: {row.reason}" for row in in_order(refusals)]
    reasons += [row.reason for row in own if row.verdict == "refused" and row.reason]
    # Device time where there is any: what a user waits is another question.
    device = [row for row in own if row.clock == "graph"]
    measured, waited = _mean(device or own), _mean([row for row in own if row.clock == "eager"]) if device else None
    verdict: Judgement
    if measured is None:
        verdict = "refused" if reasons else "undecided"
        found = reasons[0] if reasons else "nothing that can be believed was timed beside it"
    else:
        verdict = call(measured)
        rivals = dict.fromkeys(row.rival for row in device or own if row.rival)
        found = f"{_with_range(measured)} against {', '.join(rivals)}"
        if waited is not None:
            found = f"by device time {verdict}, {found}; by end-to-end latency {call(waited)}, {_with_range(waited)}"
    lead: str = verdict
    if measured is not None and waited is not None and {call(measured), call(waited)} == {"faster", "slower"}:
        verdict, lead = "undecided", "the clocks disagree"
    promise = None if promised is None else _promise(promised, measured)
    return Candidate(name, verdict, f"{lead}: {found}", tuple(dict.fromkeys(reasons)), promise)


def _mean(rows: Iterable[Verdict]) -> Interval | None:
    intervals = [row.interval for row in rows if row.interval is not None]
    return geometric_mean(intervals) if intervals else None


def _promise(promised: float, measured: Interval | None) -> str:
    if measured is None:
        return f"It promised {times(promised)}. There is no number to compare the promise with."
    end = "whether it keeps its promise is not decided."
    if measured.low >= promised:
        end = "it kept its promise."
    elif measured.high < promised:
        end = "promise broken."
    return f"It promised {times(promised)} and measured {times(measured.ratio)}: {end}"


def _with_range(measured: Interval) -> str:
    return f"{times(measured.ratio)} ({times(measured.low)} to {times(measured.high)})"
