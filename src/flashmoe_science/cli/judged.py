"""A cache of judgements of a folder of records, in the user's cache folder, keyed by a digest of the records and the program.

A cached file is read as text and numbers only. If it cannot be read, the records are judged again; if it cannot be written,
nothing is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import flashmoe_science
from flashmoe_science.cli.evidence import judged_under, machine_named, suite_named
from flashmoe_science.judge.standing import JudgedRun, standing
from flashmoe_science.judge.stats import Floats, Interval
from flashmoe_science.judge.summary import groups
from flashmoe_science.judge.trust import gpu_name
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.store import records_under
from flashmoe_science.user_cache import user_cache

_PROGRAM = Path(flashmoe_science.__file__).parent
_MAX_KEPT = 12  # files; one of 91 runs has 10 MB
_NUMBERS = [one.name for one in dataclasses.fields(Interval) if one.name != "resamples"]

Cached = tuple[Any, Floats]  # a JSON value, and an array of numbers


class Standing(NamedTuple):
    """The current verdicts, and the (GPU, suite) of every run that was judged."""

    verdicts: list[Verdict]
    runs: list[tuple[str, str]]


def standing_under(folder: Path, gpu: str | None = None, suite: str | None = None) -> Standing:
    """The current verdicts under a folder, of one GPU and one suite where these are named. Raises ValueError as
    ``judged_under``, ``machine_named`` and ``suite_named`` do."""

    def judged(runs: Sequence[JudgedRun]) -> Cached:
        rows = standing(runs)
        fronts = [row for group in groups(rows) for row in group.front if row.interval is not None]
        place = {id(row): at for at, row in enumerate(fronts)}  # those whose geometric mean is asked for
        where = [(gpu_name(one.run.header.environment), one.run.header.suite) for one in runs]
        plain = {"rows": [_plain(row, place.get(id(row))) for row in rows], "runs": where}
        return plain, np.array([row.interval.resamples for row in fronts if row.interval is not None])

    plain, numbers = cached(folder, ("standing",), judged)
    runs = [(name, of) for name, of in plain["runs"]]
    gpu, suite = machine_named(gpu, [name for name, _ in runs]), suite_named(suite, [of for _, of in runs], folder)
    rows = (_verdict(values, numbers) for values in plain["rows"])
    wanted = [(name, of) for name, of in runs if gpu in (None, name) and suite in (None, of)]
    return Standing([row for row in rows if gpu in (None, row.gpu) and suite in (None, row.suite)], wanted)


def cached(folder: Path, words: Sequence[str], judge: Callable[[Sequence[JudgedRun]], Cached]) -> Cached:
    """The result of ``judge`` for the runs under a folder, from the cache if it was computed before from the same records by
    the same program with the same ``words``. A run that is torn is reported, and its folder judged each time. Raises
    ValueError as ``judged_under`` does."""
    path = Path()
    with contextlib.suppress(Exception):  # a spoilt file may raise whatever NumPy, zipfile and JSON raise; or there is no home
        path = user_cache() / "judged" / f"{_digest(folder, words)}.npz"
        with np.load(path, allow_pickle=False) as found:
            kept = json.loads(found["text"].tobytes()), found["numbers"]
        path.touch()
        return kept
    runs = judged_under(folder)
    made = judge(runs)
    if path.name and not any(one.run.torn for one in runs):
        with contextlib.suppress(OSError):
            _write(path, made)
    return json.loads(json.dumps(made[0])), made[1]


def _write(path: Path, made: Cached) -> None:
    content = io.BytesIO()
    np.savez(content, text=np.frombuffer(json.dumps(made[0]).encode(), np.uint8), numbers=made[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(content.getvalue())
    partial.replace(path)
    latest_first = sorted(path.parent.glob("*.npz"), key=lambda one: one.stat().st_mtime, reverse=True)
    for old in latest_first[_MAX_KEPT:]:
        old.unlink(missing_ok=True)


def _digest(folder: Path, words: Sequence[str]) -> str:
    """A digest of the records, the program, the versions of NumPy and SciPy, and ``words``: equal for two equal checkouts."""
    digest = hashlib.sha256(json.dumps([*words, *map(version, ("numpy", "scipy"))]).encode())
    for root, files in ((_PROGRAM, _PROGRAM.rglob("*.py")), (folder, records_under(folder))):
        for path in sorted(files):
            content = path.read_bytes() if path.is_file() else b""  # a pipe might never end, and is refused where runs are read
            digest.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _plain(row: Verdict, place: int | None) -> dict[str, Any]:
    """A verdict as JSON holds it; ``place`` is that of its resamples among the numbers."""
    values = {one.name: getattr(row, one.name) for one in dataclasses.fields(row)}
    interval = row.interval and [*(getattr(row.interval, name) for name in _NUMBERS), place]
    return values | {"interval": interval}


def _verdict(values: dict[str, Any], numbers: Floats) -> Verdict:
    interval = None
    if values["interval"] is not None:
        *ends, place = values["interval"]
        resamples = {} if place is None else {"resamples": numbers[place]}
        interval = Interval(**dict(zip(_NUMBERS, ends, strict=True)), **resamples)
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Verdict(**values | lists | {"interval": interval})
