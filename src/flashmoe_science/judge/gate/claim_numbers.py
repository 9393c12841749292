"""The number that each problem gives for a claim, and the run that it is of.

A problem may have been measured in several runs that stand: ``standing.eligible`` says which count, none of them chosen for
its numbers. Of those, the one counts that is the worst for the claim.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flashmoe_science.judge.comparison import Comparison
from flashmoe_science.judge.gate.claim import BEST_PEER, Claim
from flashmoe_science.judge.standing import JudgedRun, eligible
from flashmoe_science.judge.stats import MIN_PAIRS, Interval
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem


@dataclass(frozen=True, slots=True)
class Number:
    """One problem's number, and the run that gives it. ``unmet`` are peers without a number that might have been best."""

    value: Interval
    run: str
    quick: bool
    unmet: tuple[str, ...] = ()


def numbers_for(claim: Claim, about: Iterable[Verdict], runs: Sequence[JudgedRun]) -> dict[str, Number | None]:
    """The number of each problem of these verdicts, None where there is none. ``runs`` are what the verdicts come from."""
    by_id = {one.run.header.run: one for one in runs}
    by_problem: dict[str, list[Verdict]] = defaultdict(list)
    for row in about:
        by_problem[row.problem].append(row)
    worst = min if is_upward(claim) else max
    found: dict[str, Number | None] = {}
    for problem, every in by_problem.items():
        answers = [_of_run(claim, rows, by_id.get(rows[0].run)) for rows in eligible(every, lambda row: _is_asked(claim, row))]
        found[problem] = worst((one for one in answers if one), key=lambda one: one.value.ratio, default=None)
    return found


def is_upward(claim: Claim) -> bool:
    """Whether a lower number makes it harder to hold."""
    return (claim.at_least is not None) != (claim.verdict == "slower")


def _is_asked(claim: Claim, row: Verdict) -> bool:
    """Whether it is of the kernel that the claim is about, with or without a number."""
    return row.origin == "ours" if claim.kernel is None else row.kernel == claim.kernel


def _of_run(claim: Claim, rows: Sequence[Verdict], run: JudgedRun | None) -> Number | None:
    """What one run's verdicts on a problem come to."""
    if claim.quantity == "ratio" and claim.kernel is not None:
        row = next((row for row in rows if row.kernel == claim.kernel), None)
        value = None if row is None else _named_ratio(claim, row, run)
    else:
        row = _verdict_of(claim, rows)
        value = None if row is None else _value(claim, row, run)
    # A count says of each row by itself whether there are too few samples.
    few = value is not None and value.pairs < MIN_PAIRS and claim.quantity != "memory" and claim.statistic != "count"
    return None if row is None or value is None or few else Number(value, row.run, row.quick, row.unmet)


def _named_ratio(claim: Claim, row: Verdict, run: JudgedRun | None) -> Interval | None:
    """The named kernel beside the named rival, its faster config where there are two; or beside the best peer."""
    conditions = (row.problem, row.clock, row.cache, row.kernel)
    beside = [one for one in (run.believed if run else ()) if (one.problem, one.clock, one.cache, one.kernel) == conditions]
    best: Comparison | None
    if claim.rival != BEST_PEER:
        named = (one for one in beside if one.rival == claim.rival)
        best = min(named, key=lambda one: (one.quick, one.time_ns), default=None)
    elif row.rival_origin in ("ours", "candidate"):  # a verdict on the best of all others: the best of the peers is asked for
        peers = (one for one in beside if one.rival_origin == "peer" and one.config == row.config)
        best = min(peers, key=lambda one: (one.quick, one.interval.ratio), default=None)
    else:
        return row.interval
    return best.interval if best else None


def _verdict_of(claim: Claim, rows: Sequence[Verdict]) -> Verdict | None:
    """The verdict to take of a run: the named kernel's, else the fastest of ours, or the named rival's against it."""

    def is_of_claim(row: Verdict) -> bool:
        if claim.kernel is not None:
            return row.kernel == claim.kernel
        if claim.rival == BEST_PEER:
            return row.of_ours
        return row.kernel == claim.rival and row.rival_origin == "ours"

    def own_time(row: Verdict) -> float:
        return (row.rival_time_ns if row.kernel == claim.rival else row.time_ns) or math.inf

    able = [row for row in rows if is_of_claim(row) and (row.time_ns if claim.quantity != "ratio" else row.ratio) is not None]
    return min(able, key=own_time, default=None)


def _value(claim: Claim, row: Verdict, run: JudgedRun | None) -> Interval | None:
    if claim.quantity == "memory":
        if row.peak_extra_bytes is None or not row.output_bytes:
            return None
        share = row.peak_extra_bytes / row.output_bytes
        return Interval(share, share, share, row.pairs)
    if claim.quantity != "ratio":
        sampled = run.times(row) if run else []
        time = next((one.time() for one in sampled if one.time_ns == row.time_ns and len(one.times) > 1), None)
        return None if time is None else _in_unit(claim, row, time)
    if row.interval is None:
        return None
    return row.interval.flipped() if row.kernel == claim.rival else row.interval


def _in_unit(claim: Claim, row: Verdict, time: Interval) -> Interval | None:
    if claim.quantity == "time_ns":
        return time
    problem = parse_problem(row.problem)
    amount = problem.flops() / 1e3 if claim.quantity == "tflops" else float(problem.min_bytes())
    if not amount:
        return None  # an operation that counts no work, or no traffic, has no rate
    rate = time.flipped()
    return replace(
        rate,
        ratio=rate.ratio * amount,
        low=rate.low * amount,
        high=rate.high * amount,
        resamples=rate.resamples + math.log(amount),
    )
