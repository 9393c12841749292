"""Entries of a gate's file, read as data and never trusted: each whole and possible, and none twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from flashmoe_science.printable import printable_values

Model = TypeVar("Model", bound=BaseModel)


class EntryError(ValueError):
    """A file of entries that cannot be read, said in one line."""


def content_of(path: Path, parse: Callable[[str], Any], form: str) -> Any:
    """What a file holds, by the parser of its form. Raises EntryError: it cannot be read, or is not of that form."""
    try:
        return printable_values(parse(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise EntryError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    except RecursionError:
        raise EntryError(f"{path} is not {form} that can be read: it is nested too deeply") from None
    except ValueError as error:  # not UTF-8, or not of the form
        raise EntryError(f"{path} is not {form}, or torn: {' '.join(str(error).split())}") from None


def entries_of(
    path: Path, what: str, values: Iterable[Any], model: type[Model], key: Callable[[Model], Hashable]
) -> list[Model]:
    """The entries of a list, in order. Raises EntryError: a field that is unknown, missing or wrong, or a key twice."""
    found: dict[Hashable, Model] = {}
    for number, one in enumerate(values, 1):
        label = repr(one["id"]) if isinstance(one, dict) and "id" in one else str(number)
        try:
            entry = model.model_validate(one)
        except ValidationError as error:
            raise EntryError(f"{path}: {what} {label}: {_complaint(error, model)}") from None
        if key(entry) in found:
            raise EntryError(f"{path}: {what} {label} stands twice")
        found[key(entry)] = entry
    return list(found.values())


def _complaint(error: ValidationError, model: type[BaseModel], most: int = 60) -> str:
    """The first field that is wrong, what is allowed and what it was, in one line."""
    fault = error.errors(include_url=False, include_context=False)[0]
    field, said = ".".join(map(str, fault["loc"])), str(fault["msg"]).removeprefix("Value error, ")
    if not field:
        return said
    if fault["type"] == "extra_forbidden":
        return f"{field}: there is no such field; there may be {', '.join(model.model_fields)}"
    if fault["type"] == "missing":
        return f"{field}: it is not given, and is needed"
    was = repr(fault["input"])
    return f"{field}: {said}; it is {was if len(was) <= most else was[:most] + '...'}"
