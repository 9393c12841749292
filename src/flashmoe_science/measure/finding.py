"""What an exam finds: one call with what the oracle says of it, and the faults that calls add up to, in words and as codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flashmoe_science.measure.naming import Named
from flashmoe_science.records import ErrorStats

OTHERS = {  # distributions beside the normal one, in words
    "zeros": "all zero",
    "constant": "all the same",
    "large": "large",
    "tiny": "tiny",
    "opposed": "opposed (every score far below zero)",
    "crowded": "crowded (all tokens for the same experts)",
}


@dataclass(slots=True)
class Finding:
    """What was found. ``reasons`` are faults in words, none where it passed, and ``codes`` name them for machines; ``notes``
    are worth knowing. ``stats`` are of each output on ordinary inputs."""

    stats: list[ErrorStats | None] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    peak_extra_bytes: int | None = None
    output_bytes: int | None = None

    def fault(self, code: str, reason: str) -> None:
        """Add a reason; the code only where it is new."""
        self.reasons.append(reason)
        self.codes += [code] if code not in self.codes else []

    def wrong(self, call: Call, how: str = "", code: str = "wrong-result") -> None:
        """Add what the oracle says of a call: all of it, or after ``how`` the first of it; and what it looks like."""
        named = [words for _, words in call.named]
        if how:
            self.fault(code, "; ".join((f"{how}: {call.reasons[0]}", *named)))
        else:
            for words in (*call.reasons, *named):
                self.fault("wrong-kind" if call.other_kind else code, words)
        self.codes += [one for one, _ in call.named if one not in self.codes]

    def left_behind(self, settings: Sequence[str], remarks: Sequence[str]) -> None:
        """Add settings that were left changed, which is a fault, and what else a call left behind."""
        if settings:
            self.fault("settings-changed", f"it leaves settings changed: {'; '.join(dict.fromkeys(settings))}")
        self.notes += dict.fromkeys(remarks)


@dataclass(frozen=True, slots=True)
class Call:
    """One call and what the oracle says of it. ``named`` is what kind of wrong it looks like: pairs of a code and words."""

    facts: dict[str, Any]
    reasons: list[str]
    other_kind: bool = False  # what came back was not of the kind that the contract has, and its numbers were not looked at
    named: Sequence[Named] = ()
    stats: Sequence[ErrorStats | None] = ()
    digest: str = ""
    vacuous: bool = False

    @property
    def nonfinite(self) -> int:
        return sum(one.nonfinite for one in self.stats if one is not None)


@dataclass(frozen=True, slots=True)
class Promised:
    """What the exam holds a kernel to beyond being right. ``workspace`` is bytes of device memory beyond the results, None
    where nothing is promised."""

    deterministic: bool
    workspace: int | None = None


def wrong_kind(outputs: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], device: str) -> list[str]:
    """How the results differ from what the contract has in number, type, shape, dtype or device, in words."""
    required = sum(not one["optional"] for one in wanted)
    if not required <= len(outputs) <= len(wanted):
        return [f"it returned {len(outputs)} results; the contract has {required}"]
    wrong = []
    for one, right in zip(outputs, wanted[: len(outputs)], strict=True):
        if one["type"] != "Tensor":
            wrong.append(f"it returned a {one['type']}, not a plain tensor")
        elif one["shape"] != right["shape"]:
            wrong.append(f"its output has shape {one['shape']}; it must be {right['shape']}")
        elif one["dtype"] != right["dtype"]:
            wrong.append(f"its output is {one['dtype']}; it must be {right['dtype']}")
        elif one["device"] != device:
            wrong.append(f"its output is on {one['device']}; the inputs are on {device}")
    return wrong
