"""What a claim is: a sentence, the records it is about, a statistic over them, and what that must reach.

A claim stands in ``evidence/claims.toml``, so that it is made before it is measured and reviewed like code::

    [[claim]]
    id = "gluon-beats-triton"
    text = "Head dimension 128, causal: the Gluon kernel is never slower than the Triton one"
    gpu = "h200"
    suite = "long"
    clock = "graph"
    kernel = "fwd_gluon_sm90"
    rival = "fwd_triton"
    head_dim = 128
    mask = "causal"
    problems = 12
    statistic = "count"
    verdict = "slower"
    at_most = 0
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from flashmoe_science.operations import parse_problem
from flashmoe_science.printable import printable_values
from flashmoe_science.problem import Dtype, Problem, ProblemError
from flashmoe_science.records import Clock

BEST_PEER = "best peer"
ANY = "any"
Quantity = Literal["ratio", "memory", "time_ns", "tflops", "gbps"]
Threshold = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1)]
Word = Annotated[str, StringConstraints(min_length=1)]
_LEAST_THRESHOLD = 1e-9
_UNITS: dict[Quantity, str] = {
    "ratio": "x",
    "memory": " of the output",
    "time_ns": " ns",
    "tflops": " TFLOP/s",
    "gbps": " GB/s",
}


class ClaimError(ValueError):
    """A claims file that cannot be read, said in one line."""


class Claim(BaseModel):
    """One claim. The problems it is about are those on record that every field given agrees with.

    ``ratio`` is the rival's time over the kernel's. ``memory`` is the device memory that one call takes beyond its inputs over
    the bytes of its output and log-sum-exp. ``tflops`` and ``gbps`` count the work and the traffic that cannot be avoided.
    The statistic "count" is of problems whose verdict, by itself, is ``verdict``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")]
    text: str
    gpu: Word
    suite: Word = ANY
    clock: Clock
    cache: Literal["cold", "warm", "any"] = (
        "cold"  # any: each problem as it was measured, warm where none is large enough to be cold
    )
    kernel: Word | None = None  # one by name, a user's or ours or a peer; else the fastest of ours on each problem
    rival: Word = BEST_PEER  # or a kernel's name
    quantity: Quantity = "ratio"
    op: Word | None = None
    problem: str | None = None  # one alone, in its text form
    dtype: Dtype | None = None
    mask: Word | None = None
    head_dim: Size | None = None
    min_seqlen: Size | None = None  # of the longer of queries and keys
    max_seqlen: Size | None = None
    problems: Annotated[int, Field(ge=1)]  # how many it is about: fewer on record are not enough
    statistic: Literal["geomean", "min", "max", "count"]
    verdict: Literal["faster", "equivalent", "slower", "undecided", "refused"] | None = None
    at_least: Threshold | None = None
    at_most: Threshold | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give one of at_least and at_most")
        if self.quantity == "memory" and self.statistic == "geomean":
            raise ValueError("statistic must be min or max for memory, which has no interval")
        if (self.statistic == "count") != (self.verdict is not None):
            raise ValueError("verdict and the statistic 'count' need each other")
        if self.quantity != "ratio" and (self.statistic == "count" or self.rival != BEST_PEER):
            raise ValueError(f"a count and a rival are of ratios; quantity is {self.quantity!r}")
        if self.statistic == "count" and self.threshold != int(self.threshold):
            raise ValueError(f"the threshold of a count must be whole; it is {self.threshold:g}")
        if self.statistic == "count" and self.at_least == 0:
            raise ValueError("at_least is 0; every count is that, so no record could show otherwise")
        if self.statistic != "count" and self.threshold < _LEAST_THRESHOLD:
            raise ValueError(f"the threshold of a {self.quantity} must be more than 0 ({_LEAST_THRESHOLD:g} at least)")
        if self.min_seqlen is not None and self.max_seqlen is not None and self.min_seqlen > self.max_seqlen:
            raise ValueError(f"min_seqlen is {self.min_seqlen} and max_seqlen is {self.max_seqlen}; no length is both")
        if self.kernel is not None and self.kernel == self.rival:
            raise ValueError(f"kernel and rival are both {self.kernel!r}")
        if self.problem is not None:
            try:
                parse_problem(self.problem)
            except ProblemError as error:
                raise ValueError(str(error)) from None
        return self

    @property
    def threshold(self) -> float:
        return self.at_least if self.at_least is not None else self.at_most  # type: ignore[return-value]  # one is given

    @property
    def unit(self) -> str:
        """What follows a figure of it: "x" for a ratio, " slower" for a count of those."""
        return f" {self.verdict}" if self.verdict is not None else _UNITS[self.quantity]

    @property
    def demand(self) -> str:
        """What it asks, as a reader writes it: ">= 1.5x"."""
        return f"{'>=' if self.at_least is not None else '<='} {self.threshold:g}{self.unit}"

    def is_about(self, problem: Problem) -> bool:
        """Whether the claim covers that problem. A size that the problem's operation lacks is a size it does not agree with."""
        lengths = [size for name in ("seqlen_q", "seqlen_k") if (size := getattr(problem, name, None)) is not None]
        if (self.min_seqlen is not None or self.max_seqlen is not None) and not lengths:
            return False
        longest = max(lengths, default=0)
        return (
            self.op in (None, problem.op)
            and (self.problem is None or parse_problem(self.problem) == problem)
            and self.dtype in (None, problem.dtype)
            and self.mask in (None, getattr(problem, "mask", ""))
            and self.head_dim in (None, getattr(problem, "head_dim", 0))
            and longest >= (self.min_seqlen or 0)
            and (self.max_seqlen is None or longest <= self.max_seqlen)
        )


def read_claims(path: Path | str) -> list[Claim]:
    """The claims of a file, in order.

    Raises:
        ClaimError: no such file, not TOML, a field that is unknown, missing or wrong, an id twice.
    """
    path = Path(path)
    try:
        content = printable_values(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise ClaimError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except RecursionError:
        raise ClaimError(f"{path} is not TOML that can be read: it is nested too deeply") from None
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


def _label(entry: object, number: int) -> str:
    return repr(entry["id"]) if isinstance(entry, dict) and "id" in entry else str(number)


def _first_complaint(error: ValidationError, most: int = 60) -> str:
    """The field, what is allowed and what it was, in one line."""
    fault = error.errors(include_url=False, include_context=False)[0]
    field, said = ".".join(str(part) for part in fault["loc"]), str(fault["msg"]).removeprefix("Value error, ")
    if not field:
        return said
    if fault["type"] == "extra_forbidden":
        return f"{field}: no claim has such a field; it may have {', '.join(Claim.model_fields)}"
    if fault["type"] == "missing":
        return f"{field}: it is not given, and every claim needs one"
    was = repr(fault["input"])
    return f"{field}: {said}; it is {was if len(was) <= most else was[:most] + '...'}"
