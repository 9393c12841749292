"""One line of a record file: JSON that is a row, of a schema that is known, with nothing in it that no measurement gives."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flashmoe_science.operations import parse_problem
from flashmoe_science.printable import one_line, printable, printable_values
from flashmoe_science.problem import ProblemError
from flashmoe_science.records import ROW, SCHEMA, Row


class StoreError(ValueError):
    """A record file that cannot be written or read, said in one line: the file, the line and what is wrong."""


class NotJsonError(StoreError):
    """A line that is not JSON at all."""


class _NumberError(ValueError):
    """A number that no measurement gives."""


def row_of(line: bytes, path: Path, number: int) -> Row:
    """The row that a line holds. Raises NotJsonError: it is no JSON, as a line is that was cut. Raises StoreError: it is no
    row; one line that names the file and the line."""
    where = f"{path}:{number}"
    try:
        values = json.loads(line, parse_constant=_no_number, parse_float=_finite)
    except _NumberError as error:
        raise StoreError(f"{where}: {error}") from None
    except (ValueError, RecursionError):
        raise NotJsonError(f"{where}: not a line of JSON ({_excerpt(line)})") from None
    version = values.get("schema_version") if isinstance(values, dict) else None
    if isinstance(version, int) and version > SCHEMA:
        raise StoreError(f"{where}: schema version {version} is newer than {SCHEMA}, the newest that is read here; upgrade")
    if isinstance(version, int) and version < 1:
        raise StoreError(f"{where}: schema version {version} never was; the first is 1")
    if (safe := _safe(values)) != values:
        line = json.dumps(safe).encode()
    try:
        row = ROW.validate_json(line, strict=True)
        problem = getattr(row, "problem", None)
        written = None if problem is None else str(parse_problem(problem))
    except ValidationError as error:
        raise StoreError(f"{where}: not a record row: {'; '.join(_complaints(error))}") from None
    except ProblemError as error:
        raise StoreError(f"{where}: {error}") from None
    if problem != written:  # two spellings would count as two problems
        raise StoreError(f"{where}: problem is {problem!r}; it must be written {written!r}")
    return row


def _safe(values: Any) -> Any:
    """What is safe to show; only a note is more than a line."""
    if not isinstance(values, dict):
        return values
    return {one_line(key): printable_values(value, printable if key == "text" else one_line) for key, value in values.items()}


def _no_number(text: str) -> float:
    raise _NumberError(f"it holds {text}; a number must be finite")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _no_number(text)


def _complaints(error: ValidationError, most: int = 3) -> Iterator[str]:
    for fault in error.errors(include_url=False, include_context=False)[:most]:
        field = ".".join(str(part) for part in fault["loc"])
        yield f"{field}: {fault['msg']}" if field else str(fault["msg"])


def _excerpt(line: bytes, most: int = 40) -> str:
    text = line[:most].decode(errors="replace")
    return repr(text) + ("..." if len(line) > most else "")
