"""What a function promises of itself, ``fn.promises = {...}``, held to what was seen."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from flashmoe_science.kernel import Launch
from flashmoe_science.measure.launches.promised import family_of
from flashmoe_science.records import PromiseRow, SeenLaunch

_WITHIN = 2.0  # a measured speed-up may be half to twice the one expected
_KINDS: dict[str, type] = {
    "kernel": str,
    "grid": list,
    "threads": int,
    "shared_bytes": int,
    "deterministic": bool,
    "speedup": float,
}
_LEAST = {"grid": 1, "threads": 1, "shared_bytes": 0}
_MOST = 2**31 - 1  # of what a launch can have
_LONGEST_NAME = 500
_MOST_SPEEDUP = 1e6


def checked(promises: Any) -> dict[str, Any]:
    """A function's promises as data, none where there are none.

    Raises:
        ValueError: a promise that is not known, of the wrong kind, or that nothing can keep.
    """
    if promises is None:
        return {}
    if not isinstance(promises, dict) or not set(promises) <= set(_KINDS):
        raise ValueError(f"promises is {repr(promises)[:200]}; it must be a dict with some of {', '.join(_KINDS)}")
    made = {}
    for name, value in promises.items():
        allowed = _wrong(name, list(value) if isinstance(value, tuple) else value)
        if allowed is not None:
            raise ValueError(f"promises[{name!r}] is {repr(value)[:200]}; it must be {allowed}")
        made[name] = list(value) if name == "grid" else value
    return made


def _wrong(name: str, value: Any) -> str | None:
    """What a promise must be, where it is not; None where it is."""
    kind = _KINDS[name]
    if kind is str:
        return None if isinstance(value, str) and _is_pattern(value) else f"a pattern of at most {_LONGEST_NAME} characters"
    if kind is bool:
        return None if isinstance(value, bool) else "True or False"
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if number and 0 < value <= _MOST_SPEEDUP else f"a number above 0, at most {_MOST_SPEEDUP:g}"
    least = _LEAST[name]
    numbers = value if kind is list and isinstance(value, list) else [value]
    whole = all(type(one) is int and least <= one <= _MOST for one in numbers)
    if whole and (kind is int or (isinstance(value, list) and len(value) == 3)):
        return None
    return f"{'three whole numbers' if kind is list else 'a whole number'} from {least} to {_MOST}"


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return len(text) <= _LONGEST_NAME


@dataclass(frozen=True, slots=True)
class Promises:
    """``launch`` is None where nothing is promised of it, ``speedup`` is over the best rival."""

    launch: Launch | None = None
    deterministic: bool = False
    speedup: float | None = None

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> Self:
        """From what the function's process read. Raises ValueError: what that process checked is checked again."""
        stated = checked(stated)
        shaped = {name: stated[name] for name in ("kernel", "grid", "threads", "shared_bytes") if stated.get(name) is not None}
        launch = None
        if shaped:
            grid = [int(one) for one in shaped["grid"]] if "grid" in shaped else None
            launch = Launch(
                name=str(shaped.get("kernel", "")),
                grid=None if grid is None else (grid[0], grid[1], grid[2]),
                threads=None if "threads" not in shaped else int(shaped["threads"]),
                shared_bytes=None if "shared_bytes" not in shaped else int(shaped["shared_bytes"]),
            )
        speedup = stated.get("speedup")
        return cls(launch, bool(stated.get("deterministic", False)), None if speedup is None else float(speedup))

    def row(self, run: str, kernel: str, source_digest: str | None) -> PromiseRow:
        """For the record, before anything is measured."""
        name, threads = (None, None) if self.launch is None else (self.launch.name or None, self.launch.threads)
        return PromiseRow(
            run=run,
            kernel=kernel,
            speedup=self.speedup,
            launch=name,
            threads=threads,
            deterministic=self.deterministic,
            source_digest=source_digest,
        )

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Kernels beside the promised one are part of its time."""
        return () if self.launch is None else (self.launch,)

    def speedup_missed(self, own_ns: Sequence[int], rival_ns: Sequence[int], rival: str) -> str | None:
        """Why the promised speed-up cannot be what was measured; None where it is within half to twice of it."""
        if self.speedup is None:
            return None
        measured = statistics.median(theirs / own for own, theirs in zip(own_ns, rival_ns, strict=True))
        if self.speedup / _WITHIN <= measured <= self.speedup * _WITHIN:
            return None
        return f"it promised {self.speedup:g} times the speed of its rival; measured against {rival}: {measured:.3g} times"


def borrowed(seen: Sequence[SeenLaunch], families: Mapping[str, str]) -> list[str]:
    """What a reader should know of a call's launches that breaks no promise: kernels that are somebody else's."""
    others = {family: one.name for one in seen if (family := family_of(one.name, families)) is not None}
    return [f"a part of its work is done by {family}: {name[:120]}" for family, name in others.items()]
