"""The launches that a kernel promises and the promises of a function (``fn.promises = {...}``), compared with what was seen."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from flashmoe_science.kernel import Launch, Origin
from flashmoe_science.records import SeenLaunch

_WITHIN = 2.0  # a measured speed-up may be half to twice the one expected


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"it is no pattern: {error}") from error
    return text


_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Grid = Annotated[
    tuple[_Count, _Count, _Count], BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)
]


class Promises(BaseModel):
    """``kernel`` is a pattern that the name of a kernel matches, ``speedup`` is over the best rival; None: nothing promised."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kernel: Annotated[str, Field(max_length=500), AfterValidator(_pattern)] | None = None
    grid: _Grid | None = None
    threads: _Count | None = None
    shared_bytes: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    deterministic: bool = False
    speedup: Annotated[float, Field(gt=0, le=1e6)] | None = None

    @classmethod
    def of(cls, stated: Any) -> Self:
        """The promises of a function from its attribute, None where it has none. Raises ValueError: a promise that is not
        known, of the wrong kind, or that nothing can keep."""
        try:
            return cls.model_validate({} if stated is None else stated)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = "".join(f"[{part!r}]" for part in first["loc"])
            raise ValueError(f"promises{where} is {repr(first['input'])[:200]}: {first['msg']}") from None

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The kernel that is promised, if any is; further kernels are part of its time."""
        if self.kernel is None and self.grid is None and self.threads is None and self.shared_bytes is None:
            return ()
        return (Launch(self.kernel or "", grid=self.grid, threads=self.threads, shared_bytes=self.shared_bytes),)

    def speedup_missed(self, own_ns: Sequence[int], rival_ns: Sequence[int], rival: str) -> str | None:
        """Why the promised speed-up cannot be what was measured; None where it is within half to twice of it."""
        if self.speedup is None:
            return None
        measured = statistics.median(theirs / own for own, theirs in zip(own_ns, rival_ns, strict=True))
        if self.speedup / _WITHIN <= measured <= self.speedup * _WITHIN:
            return None
        return f"it promised {self.speedup:g} times the speed of its rival; measured against {rival}: {measured:.3g} times"


def library_kernels(seen: Sequence[SeenLaunch], families: Mapping[str, str]) -> list[str]:
    """Notes on the launches of a call that break no promise: kernels of other libraries."""
    others = {family: one.name for one in seen if (family := _family_of(one.name, families)) is not None}
    return [f"a part of its work is done by {family}: {name[:120]}" for family, name in others.items()]


def broken_launches(
    promised: Sequence[Launch], seen: Sequence[Sequence[SeenLaunch]], origin: Origin, families: Mapping[str, str]
) -> list[str]:
    """The broken promises, as text; empty where all are kept. ``seen`` are the launches of a planned call and, if users call
    the kernel in another way, of such a call. ``families`` are patterns of kernel names by library."""
    planned, *by_user = seen
    broken = _broken(promised, planned, origin, families)
    for launches in by_user:
        other = _broken(promised, launches, origin, families)
        if origin != "peer":
            other += _user_call_differences(planned, launches)
        broken += [f"called by a user: {reason}" for reason in other]
    return broken


def _broken(promised: Sequence[Launch], seen: Sequence[SeenLaunch], origin: Origin, families: Mapping[str, str]) -> list[str]:
    """The broken promises of one call, as text. Empty where all are kept.

    Ours must launch exactly what it promises. A peer may launch more (padding, a reduction), which is part of its time, but no
    kernel of another family than it promised: that is a library's silent fallback. No launch may be on another stream or
    thread than the caller's, or after its call (``strayed``).
    """
    if not seen:
        return ["no kernel was seen"]
    broken = [f"launched {_short(one)} {one.strayed}" for one in seen if one.strayed]
    covered = set[int]()
    for launch in promised:
        matching = [index for index, one in enumerate(seen) if re.search(launch.name, one.name)]
        covered.update(matching)
        differences = {index: _differences(launch, seen[index]) for index in matching}
        kept = [index for index in matching if not differences[index]]
        if not matching:
            broken.append(f"promised a kernel named {launch.name!r}; saw {', '.join(map(_short, seen))}")
        elif not kept:
            broken.append(f"{_short(seen[matching[0]])}: {'; '.join(differences[matching[0]])}")
        elif origin == "ours" and len(matching) > sum(re.search(one.name, seen[kept[0]].name) is not None for one in promised):
            broken.append(f"{_short(seen[kept[0]])} was launched {len(matching)} times")
    for one in (one for index, one in enumerate(seen) if index not in covered):
        family = _family_of(one.name, families)
        if origin == "ours":
            broken.append(f"launched {_short(one)}, which it did not promise")
        elif origin == "peer" and family is not None:
            broken.append(f"launched {_short(one)} of {family}, which it did not promise")
    return broken


def _user_call_differences(planned: Sequence[SeenLaunch], by_user: Sequence[SeenLaunch]) -> list[str]:
    """How the launches of a user's call differ from those of the planned call, which is what is timed, as text.

    ``_broken`` compares names and sizes with the promise; here the build's registers and shared memory are compared as well.
    """
    if [one.name for one in planned] != [one.name for one in by_user]:
        return []  # reported already, for each name
    return [
        f"{_short(mine)} with {name} {other}, where the planned call has {own}"
        for mine, theirs in zip(planned, by_user, strict=True)
        for name in ("grid", "block", "shared_bytes", "cluster", "registers")
        if (own := getattr(mine, name)) != (other := getattr(theirs, name)) and None not in (own, other)
    ]


def _family_of(name: str, families: Mapping[str, str]) -> str | None:
    """The library of a kernel, by its name; None if it matches none."""
    return next((family for family, pattern in families.items() if re.search(pattern, name)), None)


def _differences(launch: Launch, seen: SeenLaunch) -> list[str]:
    threads = seen.block[0] * seen.block[1] * seen.block[2]
    pairs = (
        ("grid", launch.grid, seen.grid),
        ("threads a block", launch.threads, threads),
        ("bytes of shared memory", launch.shared_bytes, seen.shared_bytes),
        ("cluster", launch.cluster if seen.cluster is not None else None, seen.cluster),
        ("registers a thread", launch.registers, seen.registers),
    )
    return [f"promised {what} {promise}, saw {found}" for what, promise, found in pairs if promise not in (None, found)]


def _short(one: SeenLaunch) -> str:
    return repr(one.name if len(one.name) <= 120 else one.name[:117] + "...")
