"""Runs on disk: one append-only JSONL file a run, a row a line. Written by one process at a time, read by anyone, never edited;
a run that nothing rests on may be gzipped (docs/design/0010).

A file whose last line was cut (power, a full disk, a killed process) still gives its whole rows; the cut line is set aside and
reported in ``Run.torn``. Any other defect of a file is a ``StoreError``.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from flashmoe_science.locks import hold
from flashmoe_science.operations import parse_problem
from flashmoe_science.printable import one_line, printable, printable_values
from flashmoe_science.problem import ProblemError
from flashmoe_science.records import ROW, SCHEMA, DoneRow, EndRow, Row, RunRow, TimingRow

__all__ = ["Run", "RunWriter", "StoreError", "read_run", "read_runs", "records_under", "refuse_torn", "write_whole"]

_UTC = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(\+00:00|Z)"
_SUFFIXES = (".jsonl", ".jsonl.gz")
_MOST_FAULTS = 3  # of a row, that are listed
_Kind = TypeVar("_Kind", bound=Row)


class StoreError(ValueError):
    """A record file cannot be written or read: the file, the line and what is wrong, in one line."""


class _NotJsonError(StoreError):
    """A line that is not JSON at all, such as a cut one."""


class _NumberError(ValueError):
    """A number that no measurement gives."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run as it was recorded. ``torn`` is what was set aside, in words; None if nothing was."""

    header: RunRow
    rows: tuple[Row, ...]  # the header is not among them
    path: Path | None = None
    torn: str | None = None

    @property
    def age(self) -> tuple[str, str]:
        """The sort key of runs, the oldest first."""
        return self.header.started, self.header.run

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """The rows of one kind, in their order."""
        return [row for row in self.rows if isinstance(row, kind)]

    @property
    def complete(self) -> bool:
        """Whether the run ended by itself and its whole file is there."""
        return self.torn is None and bool(self.rows) and isinstance(self.rows[-1], EndRow)

    def done_by(self, kernel: str | None) -> frozenset[str]:
        """The problems that are finished, as text; in a run of functions, by one of them."""
        return frozenset(row.problem for row in self.of(DoneRow) if row.kernel == kernel)


class RunWriter(contextlib.AbstractContextManager["RunWriter"]):
    """Appends rows to a new file; each row is on disk when ``append`` returns, whole or, after an error, not at all.

    The file is locked while the writer is open. Raises StoreError: the file exists, its folder cannot be made or written, or
    the disk is full."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("xb", buffering=0)
        except FileExistsError as error:
            if error.filename == str(self.path):
                raise StoreError(f"{self.path} exists already; a run is never overwritten, choose another name") from None
            raise StoreError(f"{error.filename} is a file; a folder is needed to write {self.path.name} in") from None
        except OSError as error:
            raise StoreError(f"cannot write {self.path}: {_words(error)}; choose a folder that you can write to") from None
        hold(self._file)

    def append(self, row: Row) -> None:
        whole = self._file.tell()
        try:
            left = memoryview(row.model_dump_json().encode() + b"\n")
            while left:  # a write may take a part, and then fail on the rest
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._take_back(whole)
            raise StoreError(f"cannot append to {self.path}: {_words(error)}; the rows before it are kept") from None

    def _take_back(self, whole: int) -> None:
        """Leave no part of a row behind: a full disk can still shrink a file."""
        try:
            self._file.truncate(whole)
            self._file.seek(whole)
        except OSError:
            self._file.close()  # no row may follow a torn one

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_run(path: Path | str) -> Run:
    """Read one run's file. Raises StoreError: no such file, a line that is not a row (other than a torn last one), a row of a
    newer schema, no header first, a row of another run. One line that names the file and the line."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a pipe or a device might never end
            raise StoreError(f"{path} is {'a folder' if path.is_dir() else 'no regular file'}; a run is a file (*.jsonl)")
        content = path.read_bytes()
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).split(b"\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise StoreError(f"{path} is no whole gzip file: {error}") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {_words(error)}") from None
    unended = lines.pop()  # empty where the file ends in a newline, as a whole one does
    rows, torn = [_row(line, path, number) for number, line in enumerate(lines, 1)], None
    if unended:
        try:
            rows.append(_row(unended, path, len(lines) + 1))
        except _NotJsonError:  # a row that is cut anywhere is no JSON; anything that parses is whole, and judged as such
            torn = f"{path}:{len(lines) + 1}: the last line is torn (cut after {len(unended)} bytes)"
    return _run(path, rows, torn)


def _row(line: bytes, path: Path, number: int) -> Row:
    """The row that a line holds. Raises _NotJsonError; StoreError: it is no row; one line that names the file and the line."""
    where = f"{path}:{number}"
    try:
        values = _DECODER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
    except _NumberError as error:
        raise StoreError(f"{where}: {error}") from None
    except (ValueError, RecursionError):
        excerpt = f"{line[:40].decode(errors='replace')!r}{'...' * (len(line) > 40)}"
        raise _NotJsonError(f"{where}: not a line of JSON ({excerpt})") from None
    version = values.get("schema_version") if isinstance(values, dict) else None
    if isinstance(version, int) and version > SCHEMA:
        raise StoreError(f"{where}: schema version {version} is newer than {SCHEMA}, the newest that is read here; upgrade")
    if isinstance(version, int) and version < 1:
        raise StoreError(f"{where}: schema version {version} never was; the first is 1")
    if isinstance(values, dict) and not _is_safe(line):  # what is safe to show; only a note is more than a line
        safe = {
            one_line(name): printable_values(one, printable if name == "text" else one_line) for name, one in values.items()
        }
        line = line if safe == values else json.dumps(safe).encode()
    try:
        row = ROW.validate_json(line, strict=True)
        problem = getattr(row, "problem", None)
        written = None if problem is None else _written(problem)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)[:_MOST_FAULTS]
        complaints = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}".removeprefix(": ") for one in faults)
        raise StoreError(f"{where}: not a record row: {'; '.join(complaints)}") from None
    except ProblemError as error:
        raise StoreError(f"{where}: {error}") from None
    if problem != written:  # two spellings would count as two problems
        raise StoreError(f"{where}: problem is {problem!r}; it must be written {written!r}")
    return row


@lru_cache(maxsize=4096)
def _written(problem: str) -> str:
    """The problem's text as it must be. Rows have few problems: writing one took a third of the time of reading a row."""
    return str(parse_problem(problem))


def _is_safe(line: bytes) -> bool:
    """Whether a line of JSON can hold nothing but printable ASCII: a control character in a text is escaped, but for DEL."""
    return line.isascii() and b"\\" not in line and b"\x7f" not in line


def _no_number(text: str) -> float:
    raise _NumberError(f"it holds {text}; a number must be finite")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _no_number(text)


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)  # which json.loads would make for each row


def _run(path: Path, rows: list[Row], torn: str | None) -> Run:
    if not rows:
        raise StoreError(torn or f"{path}: the file is empty; the first line must be a row of kind 'run'")
    header, *rest = rows
    if not isinstance(header, RunRow):
        raise StoreError(f"{path}:1: the first row is of kind {header.kind!r}; it must be of kind 'run'")
    if not header.run.strip():
        raise StoreError(f"{path}:1: run is {header.run!r}; a run needs a name")
    if not _is_utc(header.started):  # the latest run counts, by this text
        raise StoreError(f"{path}:1: started is {header.started!r}; it must be a time in UTC, as 2026-01-02T03:04:05+00:00 is")
    for number, row in enumerate(rest, 2):
        if isinstance(row, RunRow):
            raise StoreError(f"{path}:{number}: a second row of kind 'run'; a file holds one run")
        if row.run != header.run:
            raise StoreError(f"{path}:{number}: the row is of run {row.run!r}; the file holds run {header.run!r}")
    return Run(header, tuple(rest), path, torn)


def _is_utc(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return re.fullmatch(_UTC, text) is not None and datetime.fromisoformat(text) is not None
    return False


def read_runs(folder: Path | str) -> list[Run]:
    """Every run under ``folder`` (``**/*.jsonl``, ``**/*.jsonl.gz``), oldest first. Raises StoreError: no such folder, a file
    that ``read_run`` refuses, or two files that hold the same run, or its samples."""
    folder = Path(folder)
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder; give one that holds run records (*.jsonl)")
    runs = [read_run(path) for path in sorted(records_under(folder))]
    runs.sort(key=lambda run: run.age)
    seen: dict[str, Path | None] = {}
    for run in runs:
        if run.header.run in seen:
            raise StoreError(f"{run.path} and {seen[run.header.run]} both hold run {run.header.run!r}; keep one of them")
        seen[run.header.run] = run.path
    _refuse_copied(runs)
    return runs


def _refuse_copied(runs: Sequence[Run]) -> None:
    """Raises StoreError if two runs hold the same samples: one is a copy under another name."""
    first_with: dict[tuple[tuple[int, ...], ...], Run] = {}
    for run in runs:
        for row in (row for row in run.of(TimingRow) if row.is_distinctive):
            first = first_with.setdefault(row.samples, run)
            if first is not run:
                raise StoreError(
                    f"{run.path} and {first.path} hold the same samples of {row.kernel} beside {row.rival} on "
                    f"'{row.problem}', to the nanosecond, which no two runs do; keep the one that was measured"
                )


def records_under(folder: Path) -> Iterator[Path]:
    """The files of runs under a folder. Raises StoreError for a folder that cannot be looked into: what it holds would be
    missing unnoticed."""

    def unreadable(error: OSError) -> None:
        raise StoreError(f"cannot look into {error.filename}: {_words(error)}") from None

    for root, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        yield from (Path(root, name) for name in (*folders, *names) if name.endswith(_SUFFIXES))


def refuse_torn(runs: list[Run]) -> list[Run]:
    """The same runs, if every file is whole, as evidence must be. Raises StoreError: the first torn file, its line and what to
    do."""
    for run in runs:
        if run.torn:
            raise StoreError(f"{run.torn}; restore the file, or delete that line to keep the rows before it")
    return runs


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def write_whole(path: Path, text: str) -> None:
    """Put a text in a file's place, whole or not at all. Raises OSError, and leaves what was there."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # another process may write the same file
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
