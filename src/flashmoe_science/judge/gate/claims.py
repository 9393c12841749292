"""Claims compared with measurements. A claim is a sentence, the records that it is about, a statistic over them and the
threshold that the statistic must reach. Claims are written in ``evidence/claims.toml``, so that they are made before they are
measured, and reviewed like code. ``flashmoe claims --help`` shows one.

A claim holds only if the near end of the interval reaches the threshold, every problem that the claim is about has a number,
and there are as many problems as the claim states. Kernels are compared on one problem at a time, where they were sampled in
pairs: a ratio of one shape's time to another's cannot be claimed. ``multiple_testing`` says which statistics are corrected for
the number of problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from flashmoe_science.judge.formats import microseconds, ratio
from flashmoe_science.judge.gate.entries import Entry, read_entries
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.multiple_testing import least, most, named
from flashmoe_science.judge.standing import JudgedRun, eligible
from flashmoe_science.judge.stats import MIN_PAIRS, Interval, geometric_mean
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Dtype, Problem
from flashmoe_science.records import Clock

BEST_PEER = "best peer"
ANY = "any"
Quantity = Literal["ratio", "memory", "time_ns"]
Threshold = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1)]
Word = Annotated[str, StringConstraints(min_length=1)]
_LEAST_THRESHOLD = 1e-9
_UNITS: dict[Quantity, str] = {"ratio": "x", "memory": " of the output", "time_ns": " us"}


class Claim(Entry):
    """One claim, about the problems on record that agree with every field that is given.

    ``quantity``: "ratio" is the rival's time over the kernel's; "memory" the device memory that one call takes beyond its
    inputs over the bytes of its outputs."""

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")]
    text: str
    gpu: Word
    suite: Word = ANY
    clock: Clock
    cache: Literal["cold", "warm", "any"] = "cold"  # any: as measured, which is warm for problems too small to be cold
    kernel: Word | None = None  # a kernel's name, of a user, of ours or of a peer; else the fastest of ours on each problem
    rival: Word = BEST_PEER  # or a kernel's name
    quantity: Quantity = "ratio"
    op: Word | None = None
    problem: str | None = None  # the text form of the only problem
    dtype: Dtype | None = None
    mask: Word | None = None
    routing: Word | None = None
    head_dim: Size | None = None
    min_seqlen: Size | None = None  # of the longer of queries and keys
    max_seqlen: Size | None = None
    problems: Size  # on record, at least
    statistic: Literal["geomean", "min", "max"]
    at_least: Threshold | None = None
    at_most: Threshold | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give one of at_least and at_most")
        if self.quantity == "memory" and self.statistic == "geomean":
            raise ValueError("statistic must be min or max for memory, which has no interval")
        if self.quantity != "ratio" and self.rival != BEST_PEER:
            raise ValueError(f"a rival is of ratios; quantity is {self.quantity!r}")
        if self.threshold < _LEAST_THRESHOLD:
            raise ValueError(f"the threshold of a {self.quantity} must be more than 0 ({_LEAST_THRESHOLD:g} at least)")
        if self.min_seqlen is not None and self.max_seqlen is not None and self.min_seqlen > self.max_seqlen:
            raise ValueError(f"min_seqlen is {self.min_seqlen} and max_seqlen is {self.max_seqlen}; no length is both")
        if self.kernel == self.rival:
            raise ValueError(f"kernel and rival are both {self.kernel!r}")
        if self.problem is not None:
            parse_problem(self.problem)
        return self

    @property
    def threshold(self) -> float:
        return self.at_least if self.at_least is not None else self.at_most  # type: ignore[return-value]  # one is given

    @property
    def demand(self) -> str:
        """The threshold as text: ">= 1.5x"."""
        return f"{'>=' if self.at_least is not None else '<='} {self.asked}"

    @property
    def asked(self) -> str:
        """The threshold with its unit."""
        shown = self.threshold / 1e3 if self.quantity == "time_ns" else self.threshold
        return f"{shown:g}{_UNITS[self.quantity]}"

    def figure(self, *values: float | None) -> str:
        """What was measured, or its interval, with the unit: "1.2x", "11.98 to 12.29 us"."""
        figures = [microseconds(one) if self.quantity == "time_ns" else ratio(one) for one in values if one is not None]
        return f"{' to '.join(figures)}{_UNITS[self.quantity]}" if figures else ""

    def is_about(self, problem: Problem) -> bool:
        """Whether the claim covers that problem; not where it asks for a size that the problem's operation does not have."""
        if self.problem is not None and parse_problem(self.problem) != problem:
            return False
        asked = ((name, getattr(self, name)) for name in ("op", "dtype", "mask", "routing", "head_dim"))
        if any(wanted not in (None, getattr(problem, name, None)) for name, wanted in asked):
            return False
        longest = max((getattr(problem, name, 0) for name in ("seqlen_q", "seqlen_k")), default=0)
        if (self.min_seqlen or self.max_seqlen) and not longest:
            return False
        return longest >= (self.min_seqlen or 0) and (self.max_seqlen is None or longest <= self.max_seqlen)


def read_claims(path: Path | str) -> list[Claim]:
    """The claims of a file, in order. Raises EntryError: no such file, not TOML, a field that is unknown, missing or wrong, an
    id twice."""
    return read_entries(Path(path), "TOML", "claim", Claim, lambda claim: claim.id)


Outcome = Literal["holds", "fails", "no record"]


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """A claim with its measurement.

    ``low`` and ``high`` are the 95% interval of ``measured`` (equal to it for memory, which is counted). ``missed_by`` is the
    relative distance from the interval's near end to the threshold (0.1: a factor of 1.1). ``refuted``: the whole interval is
    on the wrong side of the threshold; a claim that fails otherwise is neither shown nor refuted by the records. ``runs`` give
    the numbers; ``quick``: one of them took few samples. ``why`` is what is wrong or missing."""

    claim: Claim
    outcome: Outcome
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    missed_by: float | None = None
    refuted: bool = False
    problems: int = 0
    worst_problem: str | None = None
    runs: tuple[str, ...] = ()
    quick: bool = False
    why: str | None = None


_Number = tuple[Interval, Verdict]  # a problem's number, and the verdict that it is of


def judge_claim(claim: Claim, verdicts: Sequence[Verdict], runs: Sequence[JudgedRun] = ()) -> ClaimResult:
    """The result of one claim, by current verdicts.

    ``runs`` are what the verdicts come from: claims on a kernel by name, and on times, rest on their samples."""
    about = _about(claim, verdicts)
    if not about:
        return ClaimResult(claim, "no record", why=_no_verdict(claim, verdicts))
    found = _numbers(claim, about, runs)
    numbers = {problem: one for problem, one in found.items() if one}
    rest_on = tuple(sorted({row.run for _, row in numbers.values()} or {row.run for row in about}))
    if not numbers:
        return ClaimResult(claim, "fails", problems=len(found), runs=rest_on, why="none of its problems has a number")
    result = _measured(claim, {problem: value for problem, (value, _) in numbers.items()})
    lacking = None
    if len(numbers) < len(found):
        missing = [problem for problem in found if problem not in numbers]
        lacking = f"{len(missing)} of {len(found)} problems have no number, such as {missing[0]}"
    elif len(found) < claim.problems:
        lacking = f"{len(found)} problems are on record; it is about {claim.problems}"
    why = "; ".join(filter(None, (result.why, lacking, _unmeasured(claim, numbers)))) or None
    quick = any(row.quick for _, row in numbers.values())
    return replace(result, outcome="fails" if why else "holds", runs=rest_on, quick=quick, why=why)


def _unmeasured(claim: Claim, found: Mapping[str, _Number]) -> str | None:
    """Why the best peer is unknown, where a better one would be evidence against the claim."""
    problems = {problem: row.unmeasured for problem, (_, row) in found.items() if row.unmeasured}
    if not problems or claim.rival != BEST_PEER or claim.quantity != "ratio" or claim.at_least is None:
        return None
    peers = sorted({peer for unmeasured in problems.values() for peer in unmeasured})
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"the best peer is not known: no number of {', '.join(peers)} on {next(iter(problems))}{more}"


def _about(claim: Claim, verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Verdicts on the claim's problems under its conditions; empty unless each kernel that it names has one there."""
    found = [
        row
        for row in verdicts
        if (row.gpu, row.clock) == (claim.gpu, claim.clock)
        and claim.suite in (ANY, row.suite)
        and claim.cache in (ANY, row.cache)
        and claim.is_about(parse_problem(row.problem))
    ]
    named_kernels = {claim.kernel, claim.rival} - {None, BEST_PEER}
    return found if named_kernels <= {row.kernel for row in found} else []


def _no_verdict(claim: Claim, verdicts: Iterable[Verdict]) -> str:
    """The verdicts that are missing, in words."""
    by = f" of {claim.kernel}" if claim.kernel else ""
    against = "" if claim.rival == BEST_PEER else f" beside {claim.rival}"
    suite = "any suite" if claim.suite == ANY else claim.suite
    gpus = sorted({row.gpu for row in verdicts})
    elsewhere = "" if claim.gpu in gpus else f"; there are records of {', '.join(gpus) or 'no GPU'}"
    return f"no verdict{by}{against} on its problems: {suite} on {claim.gpu}, {claim.clock} clock{elsewhere}"


def _measured(claim: Claim, numbers: dict[str, Interval]) -> ClaimResult:
    """The claim's statistic over its problems, compared with the threshold."""
    upward, counted, intervals = claim.at_least is not None, claim.quantity == "memory", list(numbers.values())
    worst = (min if upward else max)(numbers, key=lambda problem: numbers[problem].ratio)
    if counted:  # bytes have no error
        figure = (min if claim.statistic == "min" else max)(intervals, key=lambda one: one.ratio)
    else:
        figure = {"geomean": geometric_mean, "min": least, "max": most}[claim.statistic](intervals)
    near = figure.low if upward else figure.high
    above, below = (claim.threshold, near) if upward else (near, claim.threshold)
    missed = above / below - 1 if below else math.inf
    by = "" if math.isinf(missed) else f" by a factor of {missed + 1:.3g}"
    end = "" if figure.low == figure.high else f"{claim.figure(near)}, the near end of its interval, "
    why = f"{end}misses {claim.asked}{by}; worst is {worst}"
    if not counted and claim.statistic == ("min" if upward else "max"):  # a single row makes the claim fail
        proven = named(intervals, claim.threshold)[upward]
        why += f"; {len(proven)} of {len(intervals)} rows are proven to miss it (Holm)"
    return ClaimResult(
        claim=claim,
        outcome="fails" if missed > 0 else "holds",
        measured=figure.ratio,
        low=figure.low,
        high=figure.high,
        missed_by=missed if 0 < missed < math.inf else None,
        refuted=figure.high < claim.threshold if upward else figure.low > claim.threshold,
        problems=len(numbers),
        worst_problem=worst,
        why=why if missed > 0 else None,
    )


def _numbers(claim: Claim, about: Iterable[Verdict], runs: Sequence[JudgedRun]) -> dict[str, _Number | None]:
    """The number of each problem of these verdicts, None where there is none. ``runs`` are what the verdicts come from.

    Several current runs may have measured a problem: of those that ``standing.eligible`` picks, which are not picked by their
    numbers, the worst for the claim counts."""
    by_id = {one.run.header.run: one for one in runs}
    worst = max if claim.at_least is None else min
    found: dict[str, _Number | None] = {}
    for problem, every in grouped(about, lambda row: row.problem).items():
        counting = eligible(every, lambda row: row.origin == "ours" if claim.kernel is None else row.kernel == claim.kernel)
        chosen = [one for rows in counting if (one := _verdict_of(claim, rows)) is not None]
        answers = [(value, row) for row in chosen if (value := _value(claim, row, by_id.get(row.run))) is not None]
        answers = [one for one in answers if one[0].pairs >= MIN_PAIRS or claim.quantity == "memory"]
        found[problem] = worst(answers, key=lambda one: one[0].ratio, default=None)
    return found


def _verdict_of(claim: Claim, rows: Sequence[Verdict]) -> Verdict | None:
    """The verdict that counts of a run: the named kernel's, else our fastest kernel's, or the named rival's against ours."""
    if claim.kernel is not None:
        return next((row for row in rows if row.kernel == claim.kernel), None)
    if claim.rival != BEST_PEER:
        against = [row for row in rows if row.kernel == claim.rival and row.rival_origin == "ours" and row.ratio is not None]
        return min(against, key=lambda row: row.rival_time_ns or math.inf, default=None)
    ours = [row for row in rows if row.of_ours and (claim.quantity != "ratio" or row.ratio is not None)]
    return min(ours, key=lambda row: row.time_ns or math.inf, default=None)


def _value(claim: Claim, row: Verdict, run: JudgedRun | None) -> Interval | None:
    if claim.quantity == "memory":
        if row.time_ns is None or row.peak_extra_bytes is None or not row.output_bytes:
            return None
        share = row.peak_extra_bytes / row.output_bytes
        return Interval(share, share, share, row.pairs)
    if claim.quantity == "time_ns":
        return next((one.time() for one in (run.comparisons_of(row) if run else ()) if one.time_ns == row.time_ns), None)
    if claim.kernel is None:
        return row.interval.flipped() if row.interval and row.kernel == claim.rival else row.interval
    # The named kernel against the named rival, its faster config where there are two; or against the best peer.
    conditions = (row.problem, row.clock, row.cache, row.kernel)
    pairs = [one for one in (run.believed if run else ()) if (one.problem, one.clock, one.cache, one.kernel) == conditions]
    if claim.rival != BEST_PEER:
        beside = (one for one in pairs if one.rival == claim.rival)
        best = min(beside, key=lambda one: (one.quick, one.time_ns), default=None)
    elif row.rival_origin in ("ours", "candidate"):  # a verdict on the best of all others: the best of the peers is asked for
        peers = (one for one in pairs if one.rival_origin == "peer" and one.config == row.config)
        best = min(peers, key=lambda one: (one.quick, one.interval.ratio), default=None)
    else:
        return row.interval
    return best.interval if best else None
