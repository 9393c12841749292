"""The file of the ratchet: JSON, sorted, an entry a line so that a review sees what moved; read as data, never trusted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flashmoe_science.judge.gate.entries import EntryError, content_of, entries_of
from flashmoe_science.operations import parse_problem
from flashmoe_science.records import Cache, Clock
from flashmoe_science.store import write_whole

SCHEMA = 1
OURS = "ours"
Ratio = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class RatchetError(EntryError):
    """A ratchet that cannot be read, believed or moved, said in one line."""


class Key(NamedTuple):
    """What one entry is about, and the order in which entries stand."""

    gpu: str
    problem: str
    clock: Clock
    cache: Cache
    subject: str

    @property
    def words(self) -> str:
        whose = "" if self.subject == OURS else f"{self.subject} on "
        return f"{whose}{self.problem} ({self.gpu}, {self.clock} clock, {self.cache} cache)"


class Accepted(BaseModel):
    """A deliberate lowering: why, and what was kept before."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    reason: Annotated[str, Field(min_length=1)]
    from_ratio: Ratio
    from_run: str


class Kept(BaseModel):
    """The best known of one place: the rival's time over the kernel's, with its 95% interval, and the run it rests on."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    gpu: str
    problem: str
    clock: Clock
    cache: Cache
    subject: str
    rival: str
    ratio: Ratio
    low: Ratio
    high: Ratio
    kernel: str
    config: str
    run: str
    torch: str | None
    accepted: Accepted | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.low <= self.ratio <= self.high:
            raise ValueError(f"ratio is {self.ratio:g}, which is not within {self.low:g} to {self.high:g}")
        written = str(parse_problem(self.problem))
        if self.problem != written:
            raise ValueError(f"problem is {self.problem!r}; it must be written {written!r}")
        return self

    @property
    def key(self) -> Key:
        return Key(self.gpu, self.problem, self.clock, self.cache, self.subject)


def read_ratchet(path: Path) -> list[Kept]:
    """The entries of a file. Raises EntryError: no such file; one that is torn, newer, or holds anything but whole and
    possible entries, each once."""
    if not path.exists():
        raise RatchetError(f"{path} does not exist; flashmoe ratchet --update makes it from the records")
    content = content_of(path, json.loads, "JSON")
    if not isinstance(content, dict) or type(content.get("schema")) is not int or content["schema"] < 1:
        raise RatchetError(f'{path} holds no ratchet; it must be {{"schema": {SCHEMA}, "entries": [...]}}')
    if content["schema"] > SCHEMA:
        raise RatchetError(f"{path} has schema {content['schema']}, newer than {SCHEMA}, the newest that is read here; upgrade")
    if set(content) != {"schema", "entries"} or not isinstance(content["entries"], list):
        raise RatchetError(f"{path} holds {', '.join(map(repr, content))}; it must hold 'schema' and a list of 'entries'")
    return entries_of(path, "entry", content["entries"], Kept, lambda kept: kept.key)


def write_ratchet(path: Path, kept: Iterable[Kept]) -> None:
    """Write the entries, sorted, in one step: a reader sees the old file or the new one. Raises RatchetError if it cannot."""
    entries = [one.model_dump(exclude=None if one.accepted else {"accepted"}) for one in sorted(kept, key=lambda one: one.key)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, entries_as_text(SCHEMA, entries))
    except OSError as error:
        raise RatchetError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None


def entries_as_text(schema: int, entries: Sequence[dict[str, Any]]) -> str:
    """JSON with an entry a line, so that a review sees what changed."""
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    return f'{{"schema": {schema}, "entries": [{f"{chr(10)}{lines}{chr(10)}" if lines else ""}]}}\n'
