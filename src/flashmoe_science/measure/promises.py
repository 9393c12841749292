"""What a function promises of itself, ``fn.promises = {...}``, held to what was seen."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from flashmoe_science.kernel import Launch
from flashmoe_science.measure.launches.promised import family_of
from flashmoe_science.records import PromiseRow, SeenLaunch

_WITHIN = 2.0  # a measured speed-up may be half to twice the one expected


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"it is no pattern: {error}") from error
    return text


_Count = Annotated[int, Field(ge=1, lt=2**31)]


class Promises(BaseModel):
    """``kernel`` is a pattern that the name of a kernel matches, ``speedup`` is over the best rival; None: nothing promised."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kernel: Annotated[str, Field(max_length=500), AfterValidator(_pattern)] | None = None
    grid: tuple[_Count, _Count, _Count] | None = None
    threads: _Count | None = None
    shared_bytes: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    deterministic: bool = False
    speedup: Annotated[float, Field(gt=0, le=1e6)] | None = None

    @classmethod
    def of(cls, stated: Any) -> Self:
        """From what a function states of itself, None where that is nothing.

        Raises:
            ValueError: a promise that is not known, of the wrong kind, or that nothing can keep.
        """
        if isinstance(stated, dict) and isinstance(stated.get("grid"), list):
            stated = stated | {"grid": tuple(stated["grid"])}
        try:
            return cls.model_validate({} if stated is None else stated)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = "".join(f"[{part!r}]" for part in first["loc"])
            raise ValueError(f"promises{where} is {repr(first['input'])[:200]}: {first['msg']}") from None

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The kernel that is promised, if any is; kernels beside it are part of its time."""
        if self.kernel is None and self.grid is None and self.threads is None and self.shared_bytes is None:
            return ()
        return (Launch(self.kernel or "", grid=self.grid, threads=self.threads, shared_bytes=self.shared_bytes),)

    def row(self, run: str, kernel: str, source_digest: str | None) -> PromiseRow:
        """For the record, before anything is measured."""
        return PromiseRow(
            run=run,
            kernel=kernel,
            speedup=self.speedup,
            launch=self.kernel,
            threads=self.threads,
            deterministic=self.deterministic,
            source_digest=source_digest,
        )

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
