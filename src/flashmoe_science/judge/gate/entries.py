"""Entries of a gate's file (claims, kept ratios), checked as foreign data: each complete and possible, none given twice."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from flashmoe_science.printable import printable_values

SCHEMA = 1  # of JSON files
_MOST_SHOWN = 60  # characters of a wrong value


class Entry(BaseModel):
    """An entry of a gate's file: its own fields alone, each of its type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Model = TypeVar("Model", bound=Entry)


class EntryError(ValueError):
    """A file of entries cannot be read, trusted or changed: the reason, in one line."""


def read_entries(
    path: Path, form: Literal["JSON", "TOML"], what: str, model: type[Model], key: Callable[[Model], Hashable]
) -> list[Model]:
    """The entries of a file that holds a list named ``what`` and nothing else, in order; a JSON file holds its schema, too.

    Raises EntryError: the file cannot be read, is torn, newer, or holds anything else; a field is unknown, missing or wrong; a
    key is given twice."""
    try:
        content = printable_values((json.loads if form == "JSON" else tomllib.loads)(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise EntryError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except RecursionError:
        raise EntryError(f"{path} is not {form} that can be read: it is nested too deeply") from None
    except ValueError as error:  # not UTF-8, or not of the form
        raise EntryError(f"{path} is not {form}, or torn: {' '.join(str(error).split())}") from None
    whole: Any = {"schema": SCHEMA, what: []} | content if form == "TOML" else content
    if not isinstance(whole, dict) or type(whole.get("schema")) is not int or set(whole) != {"schema", what}:
        fields = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        allowed = f"{'schema, ' * (form == 'JSON')}{what} and nothing else"
        raise EntryError(f"{path} holds {fields or 'nothing'}; it must hold {allowed}")
    if whole["schema"] != SCHEMA:
        raise EntryError(f"{path} has schema {whole['schema']}; it must be {SCHEMA}")
    if not isinstance(whole[what], list):
        raise EntryError(f"{path} has a {type(whole[what]).__name__} of {what}; it must be a list")
    found: dict[Hashable, Model] = {}
    for number, one in enumerate(whole[what], 1):
        label = repr(one["id"]) if isinstance(one, dict) and "id" in one else str(number)
        try:
            entry = model.model_validate(one)
        except ValidationError as error:
            raise EntryError(f"{path}: {what} {label}: {_complaint(error, model)}") from None
        if key(entry) in found:
            raise EntryError(f"{path}: {what} {label} is given twice")
        found[key(entry)] = entry
    return list(found.values())


def _complaint(error: ValidationError, model: type[BaseModel]) -> str:
    """The first field that is wrong, what is allowed and what it was, in one line."""
    fault = error.errors(include_url=False, include_context=False)[0]
    field, message = ".".join(map(str, fault["loc"])), str(fault["msg"]).removeprefix("Value error, ")
    if not field:
        return message
    if fault["type"] == "extra_forbidden":
        return f"{field}: there is no such field; there may be {', '.join(model.model_fields)}"
    if fault["type"] == "missing":
        return f"{field}: it is not given, and is needed"
    was = repr(fault["input"])
    return f"{field}: {message}; it is {was if len(was) <= _MOST_SHOWN else was[:_MOST_SHOWN] + '...'}"


def entries_as_text(schema: int, entries: list[dict[str, Any]], gpu: str | None = None) -> str:
    """JSON with an entry a line, so that a diff shows what changed; ``gpu``: the card of all entries, if they have one."""
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    card = "" if gpu is None else f'"gpu": {json.dumps(gpu)}, '
    return f'{{"schema": {schema}, {card}"entries": [{f"{chr(10)}{lines}{chr(10)}" if lines else ""}]}}\n'
