"""What a claim is: a sentence, the records it is about, a statistic over them, and what that must reach.

A claim stands in ``evidence/claims.toml``, so that it is made before it is measured and reviewed like code; ``flashmoe claims
--help`` shows one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from flashmoe_science.judge.gate.entries import Entry, read_entries
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
_UNITS: dict[Quantity, str] = {"ratio": "x", "memory": " of the output", "time_ns": " ns"}


class Claim(Entry):
    """One claim. The problems it is about are those on record that every field given agrees with.

    ``ratio`` is the rival's time over the kernel's; ``memory`` the device memory that one call takes beyond its inputs over the
    bytes of its output and log-sum-exp."""

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]+$")]
    text: str
    gpu: Word
    suite: Word = ANY
    clock: Clock
    cache: Literal["cold", "warm", "any"] = (
        "cold"  # any: each problem as it was measured, warm where it is too small to be cold
    )
    kernel: Word | None = None  # one by name, a user's or ours or a peer; else the fastest of ours on each problem
    rival: Word = BEST_PEER  # or a kernel's name
    quantity: Quantity = "ratio"
    op: Word | None = None
    problem: str | None = None  # one alone, in its text form
    dtype: Dtype | None = None
    mask: Word | None = None
    routing: Word | None = None
    head_dim: Size | None = None
    min_seqlen: Size | None = None  # of the longer of queries and keys
    max_seqlen: Size | None = None
    problems: Size  # how many it is about: fewer on record are not enough
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
    def unit(self) -> str:
        """What follows a figure of it: "x" for a ratio."""
        return _UNITS[self.quantity]

    @property
    def demand(self) -> str:
        """What it asks, as a reader writes it: ">= 1.5x"."""
        return f"{'>=' if self.at_least is not None else '<='} {self.threshold:g}{self.unit}"

    def is_about(self, problem: Problem) -> bool:
        """Whether the claim covers that problem. A size that the problem's operation lacks is a size it does not agree with."""
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
