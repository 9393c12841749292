"""Claims held against verdicts: what we say of ourselves, the figure that was measured, and by how much it was missed.

A claim stands in ``evidence/claims.toml``, so that it is made before it is measured and reviewed like code. It holds only by
the near end of the interval, only if every problem it is about has a number, and only if there are as many as it says.
"""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from flashmoe_science.judge.stats import Interval, geometric_mean
from flashmoe_science.judge.verdict import Verdict
from flashmoe_science.problem import AttentionProblem, parse_problem
from flashmoe_science.records import Cache, Clock

Outcome = Literal["holds", "fails", "no record"]
BEST_PEER = "best peer"


class ClaimError(ValueError):
    """A claims file that cannot be read, said in one line."""


class Claim(BaseModel):
    """One claim: a statistic over the verdicts that it selects, and what it must reach.

    ``ratio`` is the rival's time over that of the fastest of our kernels on each problem. ``memory`` is the device memory that
    one call takes beyond its inputs over the bytes of its output and log-sum-exp.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")]
    text: str
    gpu: str
    suite: str
    clock: Clock
    cache: Cache | Literal["any"] = "cold"  # any: each problem as it was measured, warm where none is large enough to be cold
    quantity: Literal["ratio", "memory"] = "ratio"
    rival: str = BEST_PEER  # or a peer's name
    max_seqlen: int | None = None  # of queries and keys
    problems: Annotated[int, Field(ge=1)]  # how many it is about: fewer on record are not enough
    statistic: Literal["geomean", "min", "max"]
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _one_threshold(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give one of at_least and at_most")
        if self.quantity == "memory" and self.statistic == "geomean":
            raise ValueError("statistic must be min or max for memory, which has no interval")
        return self

    @property
    def threshold(self) -> float:
        return self.at_least if self.at_least is not None else self.at_most  # type: ignore[return-value]  # one is given

    @property
    def demand(self) -> str:
        """What it asks, as a reader writes it: ">= 1.5x"."""
        unit = "x" if self.quantity == "ratio" else " of the output"
        return f"{'>=' if self.at_least is not None else '<='} {self.threshold:g}{unit}"


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """A claim beside its measurement.

    ``low`` and ``high`` are the 95% interval of ``measured`` (equal to it for memory, which is counted). ``missed_by`` is the
    relative distance from the interval's near end to the threshold: 0.1 is 10%. ``why`` says what is wrong or lacking.
    """

    claim: Claim
    outcome: Outcome
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    missed_by: float | None = None
    problems: int = 0
    worst_problem: str | None = None
    runs: tuple[str, ...] = ()
    why: str | None = None


def read_claims(path: Path | str) -> list[Claim]:
    """The claims of a file, in order.

    Raises:
        ClaimError: no such file, not TOML, a field that is unknown, missing or wrong, an id twice.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClaimError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise ClaimError(f"{path} is not TOML: {' '.join(str(error).split())}") from None
    entries = content.pop("claim", [])
    if content or not isinstance(entries, list):
        raise ClaimError(f"{path} holds {', '.join(content) or 'no list'}; it must hold [[claim]] tables and nothing else")
    claims: list[Claim] = []
    for number, entry in enumerate(entries, 1):
        try:
            claims.append(Claim.model_validate(entry))
        except ValidationError as error:
            raise ClaimError(f"{path}: claim {_label(entry, number)}: {_first_complaint(error)}") from None
    for number, claim in enumerate(claims):
        if any(other.id == claim.id for other in claims[:number]):
            raise ClaimError(f"{path}: claim {claim.id!r} stands twice")
    return claims


def judge_claims(verdicts: Sequence[Verdict], path: Path | str) -> list[ClaimResult]:
    """Hold every claim of a file against verdicts that stand. Raises ClaimError as ``read_claims`` does."""
    return [judge_claim(claim, verdicts) for claim in read_claims(path)]


def judge_claim(claim: Claim, verdicts: Sequence[Verdict]) -> ClaimResult:
    """Hold one claim against verdicts that stand."""
    about = list(_about(claim, verdicts))
    if not about:
        return ClaimResult(claim, "no record", why=f"no verdict of {claim.suite} on {claim.gpu}, {claim.clock} clock")
    chosen = _one_a_problem(claim, about)
    runs = tuple(sorted({row.run for row in about}))
    numbers = {problem: number for problem, row in chosen.items() if row and (number := _number(claim, row))}
    if not numbers:
        return ClaimResult(claim, "fails", problems=len(chosen), runs=runs, why="none of its problems has a number")
    worst = (min if claim.at_least is not None else max)(numbers, key=lambda problem: numbers[problem].ratio)
    figure = _figure(claim, list(numbers.values()))
    near = figure.low if claim.at_least is not None else figure.high
    missed = claim.threshold / near - 1 if claim.at_least is not None else near / claim.threshold - 1
    why = _lacking(claim, len(chosen), [problem for problem in chosen if problem not in numbers])
    if missed > 0:
        end = "" if figure.low == figure.high else f"{near:.3f}, the near end of its interval, "
        why = "; ".join(filter(None, (f"{end}misses {claim.threshold:g} by {missed:.1%}; worst is {worst}", why)))
    return ClaimResult(
        claim=claim,
        outcome="fails" if why else "holds",
        measured=figure.ratio,
        low=figure.low,
        high=figure.high,
        missed_by=missed if missed > 0 else None,
        problems=len(numbers),
        worst_problem=worst,
        runs=runs,
        why=why,
    )


def _about(claim: Claim, verdicts: Iterable[Verdict]) -> Iterable[Verdict]:
    """Verdicts on the claim's problems and conditions that a number of ours may come from."""
    for row in verdicts:
        asked = (claim.gpu, claim.suite, claim.clock, row.cache if claim.cache == "any" else claim.cache)
        if (row.gpu, row.suite, row.clock, row.cache) != asked:
            continue
        problem = parse_problem(row.problem)
        longest = max(problem.seqlen_q, problem.seqlen_k) if isinstance(problem, AttentionProblem) else math.inf
        if claim.max_seqlen is None or longest <= claim.max_seqlen:
            yield row


def _one_a_problem(claim: Claim, about: Iterable[Verdict]) -> dict[str, Verdict | None]:
    """The verdict that speaks for each problem: the fastest of ours, or the named rival's against it; None where none does."""
    every: dict[str, list[Verdict]] = defaultdict(list)
    for row in about:
        ours = row.origin == "ours" if claim.rival == BEST_PEER else row.kernel == claim.rival and row.rival_origin == "ours"
        every[row.problem] += [row] if ours and row.ratio is not None else []
    return {
        problem: min(rows, key=lambda row: _ours_time(row) or float("inf")) if rows else None for problem, rows in every.items()
    }


def _ours_time(row: Verdict) -> float | None:
    return row.time_ns if row.origin == "ours" else row.rival_time_ns


def _number(claim: Claim, row: Verdict) -> Interval | None:
    if claim.quantity == "memory":
        if row.peak_extra_bytes is None or not row.output_bytes:
            return None
        share = row.peak_extra_bytes / row.output_bytes
        return Interval(share, share, share, row.pairs)
    if row.interval is None:
        return None
    return row.interval if row.origin == "ours" else row.interval.flipped()


def _figure(claim: Claim, numbers: Sequence[Interval]) -> Interval:
    if claim.statistic == "geomean":
        return geometric_mean(numbers)
    pick = min if claim.statistic == "min" else max
    ratio, low, high = (pick(getattr(number, field) for number in numbers) for field in ("ratio", "low", "high"))
    return Interval(ratio, low, high, sum(number.pairs for number in numbers))


def _lacking(claim: Claim, found: int, silent: Sequence[str]) -> str | None:
    if silent:
        return f"{len(silent)} of {found} problems have no number, such as {silent[0]}"
    if found < claim.problems:
        return f"{found} problems are on record; it is about {claim.problems}"
    return None


def _label(entry: object, number: int) -> str:
    return repr(entry["id"]) if isinstance(entry, dict) and "id" in entry else str(number)


def _first_complaint(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in fault["loc"])
    return f"{field}: {fault['msg']}" if field else str(fault["msg"])
