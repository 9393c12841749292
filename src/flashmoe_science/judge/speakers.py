"""Who speaks for a problem that a claim is about, and with which number.

A problem may have been measured in several runs that stand: of several suites, or with kernels on trial beside ours. No run is
chosen for being kind to the claim. Cold rows go before warm ones, runs of kernels by themselves before those in which a user's
were on trial, full ones before quick ones; and of those that are left, the one speaks that is the worst for the claim.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from flashmoe_science.judge.claim import BEST_PEER, Claim
from flashmoe_science.judge.matchups import Matchup, matchups
from flashmoe_science.judge.stats import MIN_PAIRS, Interval, time_interval
from flashmoe_science.judge.trust import is_control, resolution_of
from flashmoe_science.judge.verdict import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import TimingRow
from flashmoe_science.store import Run


@dataclass(frozen=True, slots=True)
class Spoken:
    """The number of one problem, and the run that gives it. ``unmet`` are peers without a number that might have been best."""

    number: Interval
    run: str
    quick: bool
    unmet: tuple[str, ...] = ()


class Samples:
    """The runs that verdicts come from, for what no verdict says."""

    def __init__(self, runs: Sequence[Run] = ()) -> None:
        self.runs = runs

    @cached_property
    def pairs(self) -> list[Matchup]:
        return [one for run in self.runs for one in matchups(run)]

    def of(self, verdict: Verdict) -> Interval | None:
        """The time that a verdict gives, in ns, with its interval from the samples; None where they are not at hand."""
        wanted = (verdict.run, verdict.problem, verdict.clock, verdict.cache, verdict.kernel, verdict.config)
        for row in (row for run in self.runs for row in run.rows):
            if not isinstance(row, TimingRow) or is_control(row):
                continue
            for name, config, times in ((row.kernel, row.config, row.a), (row.rival, row.rival_config, row.b)):
                same = (row.run, row.problem, row.clock, row.cache, name, config) == wanted
                if same and len(times) > 1 and statistics.median(times) == verdict.time_ns:
                    return time_interval(times, resolution_of(row))
        return None


def spoken(claim: Claim, about: Iterable[Verdict], samples: Samples) -> dict[str, Spoken | None]:
    """The number that speaks for each problem of these verdicts, None where none does."""
    found: dict[str, list[Verdict]] = {}
    for row in about:
        found.setdefault(row.problem, []).append(row)
    return {
        problem: _worst(claim, [_of_run(claim, rows, samples) for rows in _runs(claim, every)])
        for problem, every in found.items()
    }


def is_upward(claim: Claim) -> bool:
    """Whether a lower number makes it harder to hold."""
    return (claim.at_least is not None) != (claim.verdict == "slower")


def _runs(claim: Claim, rows: Sequence[Verdict]) -> list[list[Verdict]]:
    """One problem's verdicts by run, of the runs that may speak of it; none of them chosen by its numbers."""
    trials = {row.run for row in rows if row.brought}
    for kinder in (
        lambda row: row.cache == "cold",
        lambda row: row.run not in trials,
        lambda row: not row.quick,
    ):
        left = [row for row in rows if kinder(row)]
        rows = left if any(_is_asked(claim, row) for row in left) else rows
    runs: dict[str, list[Verdict]] = {}
    for row in rows:
        runs.setdefault(row.run, []).append(row)
    return list(runs.values())


def _is_asked(claim: Claim, row: Verdict) -> bool:
    """Whether it is of the kernel that the claim is about, with or without a number."""
    return row.origin == "ours" if claim.kernel is None else row.kernel == claim.kernel


def _worst(claim: Claim, found: Iterable[Spoken | None]) -> Spoken | None:
    """The one that makes the claim hardest to hold."""
    return (min if is_upward(claim) else max)((one for one in found if one), key=lambda one: one.number.ratio, default=None)


def _of_run(claim: Claim, rows: Sequence[Verdict], samples: Samples) -> Spoken | None:
    """What one run's verdicts on a problem come to."""
    if claim.quantity == "ratio" and claim.kernel is not None:
        return _beside(claim, rows, samples)
    row = _speaker(claim, rows)
    number = None if row is None else _number(claim, row, samples)
    return None if row is None or number is None or _few(claim, number) else Spoken(number, row.run, row.quick, row.unmet)


def _few(claim: Claim, number: Interval) -> bool:
    """Whether there are too few samples for an interval to hold. A count says so by itself, of each row."""
    return number.pairs < MIN_PAIRS and claim.quantity != "memory" and claim.statistic != "count"


def _beside(claim: Claim, rows: Sequence[Verdict], samples: Samples) -> Spoken | None:
    """The named kernel beside the named rival, its faster config where there are two; or beside the best peer."""
    row = next((row for row in rows if row.kernel == claim.kernel), None)
    if row is None:
        return None
    pairs = [one for one in samples.pairs if one.kernel == claim.kernel and _same(one, row)]
    number: Interval | None
    if claim.rival != BEST_PEER:
        named = [one for one in pairs if one.rival == claim.rival]
        number = min(named, key=lambda one: (one.quick, one.time_ns)).interval if named else None
    elif row.rival_origin in ("ours", "candidate"):  # a verdict on the best of all others: the best of the peers is asked for
        peers = [one for one in pairs if one.rival_origin == "peer" and one.config == row.config]
        number = min(peers, key=lambda one: (one.quick, one.interval.ratio)).interval if peers else None
    else:
        number = row.interval
    return None if number is None or _few(claim, number) else Spoken(number, row.run, row.quick, row.unmet)


def _same(one: Matchup, row: Verdict) -> bool:
    return (one.run, one.problem, one.clock, one.cache) == (row.run, row.problem, row.clock, row.cache)


def _speaker(claim: Claim, rows: Sequence[Verdict]) -> Verdict | None:
    """The verdict that speaks for a run: the named kernel's, else the fastest of ours, or the named rival's against it."""

    def speaks(row: Verdict) -> bool:
        if claim.kernel is not None:
            return row.kernel == claim.kernel
        if claim.rival == BEST_PEER:
            return row.of_ours
        return row.kernel == claim.rival and row.rival_origin == "ours"

    able = [row for row in rows if speaks(row) and (row.time_ns if claim.quantity != "ratio" else row.ratio) is not None]
    return min(able, key=lambda row: _own_time(claim, row) or math.inf, default=None)


def _own_time(claim: Claim, row: Verdict) -> float | None:
    return row.rival_time_ns if row.kernel == claim.rival else row.time_ns


def _number(claim: Claim, row: Verdict, samples: Samples) -> Interval | None:
    if claim.quantity == "memory":
        if row.peak_extra_bytes is None or not row.output_bytes:
            return None
        share = row.peak_extra_bytes / row.output_bytes
        return Interval(share, share, share, row.pairs)
    if claim.quantity != "ratio":
        time = samples.of(row)
        return None if time is None else _in_unit(claim, row, time)
    if row.interval is None:
        return None
    return row.interval.flipped() if row.kernel == claim.rival else row.interval


def _in_unit(claim: Claim, row: Verdict, time: Interval) -> Interval | None:
    if claim.quantity == "time_ns":
        return time
    problem = parse_problem(row.problem)
    if not (problem.flops() if claim.quantity == "tflops" else problem.min_bytes()):
        return None  # an operation that counts no work, or no traffic, has no rate
    amount = problem.flops() / 1e3 if claim.quantity == "tflops" else float(problem.min_bytes())
    rate = time.flipped()
    return replace(
        rate,
        ratio=rate.ratio * amount,
        low=rate.low * amount,
        high=rate.high * amount,
        resamples=rate.resamples + math.log(amount),
    )
