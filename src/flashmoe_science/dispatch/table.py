"""dispatch/table.json: which of our kernels was measured fastest, by problem and GPU. Generated from records, reviewed.

``{"schema": 1, "entries": [{"gpu": "h200", "problem": "attn ...", "kernel": "...", "config": "block_m=64", "run": "...",
"time_ns": 2420}]}``. A problem stands without its layout word, which decides strides and not which kernel is apt.
An entry has ``peers`` where its run has some faster than the kernel by more than 3%: ``[{"kernel": "sdpa", "config": "",
"ratio": 1.267, "problem": "attn ... bshd", "backend": "PyTorch's cuDNN backend"}]``, in the memory order that was measured.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe_science.hardware.gpus import gpu_named
from flashmoe_science.kernel import Config
from flashmoe_science.operations import parse_problem
from flashmoe_science.problem import Problem

SCHEMA = 1
PATH = Path(__file__).with_name("table.json")


class TableError(ValueError):
    """The table cannot be read: which entry, and what is wrong with it, in one line."""


@dataclass(frozen=True, slots=True)
class FasterPeer:
    """A peer that was faster than the winner of ours in its run: ``ratio`` is our time over the peer's. ``backend`` says in
    words what PyTorch chose where it chose for itself."""

    kernel: str
    config: Config
    ratio: float
    problem: Problem
    backend: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One measured winner. ``run`` names the record that it rests on; ``time_ns`` is its median on the graph clock. ``peers``
    were faster, the fastest first."""

    gpu: str
    problem: Problem
    kernel: str
    config: Config
    run: str
    time_ns: int
    peers: tuple[FasterPeer, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Entries, at most one for a GPU and a problem."""

    entries: tuple[Entry, ...]

    def exact(self, gpu: str, problem: Problem) -> Entry | None:
        wanted = problem.without_layout()
        return next((entry for entry in self.entries if entry.gpu == gpu and entry.problem == wanted), None)


@functools.cache
def committed_table() -> Table:
    """The table that the package ships, parsed once.

    Raises:
        TableError: it is missing or malformed.
    """
    try:
        text = PATH.read_text(encoding="utf-8")
    except OSError as error:
        raise TableError(f"dispatch table {PATH} cannot be read: {error.strerror}") from error
    return parse_table(text, str(PATH))


def parse_table(text: str, source: str) -> Table:
    """Read the table's JSON; ``source`` names it in messages.

    Raises:
        TableError: not JSON, another schema, a field that is missing or wrong, or two entries for one GPU and problem.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise TableError(f"dispatch table {source} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise TableError(f"dispatch table {source} has schema {found!r}; this version reads schema {SCHEMA}")
    if not isinstance(content.get("entries"), list):
        raise TableError(f"dispatch table {source} lacks the list 'entries'")
    entries: list[Entry] = []
    seen: dict[tuple[str, Problem], int] = {}
    for number, raw in enumerate(content["entries"]):
        try:
            entry = _entry(raw)
        except (KeyError, TypeError, ValueError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise TableError(f"dispatch table {source}, entry {number}: {what}") from error
        earlier = seen.setdefault((entry.gpu, entry.problem), number)
        if earlier != number:
            raise TableError(
                f"dispatch table {source}: entries {earlier} and {number} both give {entry.problem} on {entry.gpu}"
            )
        entries.append(entry)
    return Table(tuple(entries))


def _entry(raw: Any) -> Entry:
    if not isinstance(raw, dict):
        raise TypeError(f"is a {type(raw).__name__}; it must be an object")
    for field in ("gpu", "problem", "kernel", "config", "run"):
        if not isinstance(raw[field], str):
            raise TypeError(f"{field} is {raw[field]!r}; it must be a string")
    if isinstance(raw["time_ns"], bool) or not isinstance(raw["time_ns"], int) or raw["time_ns"] < 1:
        raise TypeError(f"time_ns is {raw['time_ns']!r}; it must be a positive integer")
    return Entry(
        gpu=gpu_named(raw["gpu"]).name,
        problem=parse_problem(raw["problem"]).without_layout(),
        kernel=raw["kernel"],
        config=Config.parse(raw["config"]),
        run=raw["run"],
        time_ns=raw["time_ns"],
        peers=tuple(map(_peer, raw.get("peers", []))),
    )


def _peer(raw: Any) -> FasterPeer:
    texts = {"kernel": raw["kernel"], "config": raw["config"], "problem": raw["problem"], "backend": raw.get("backend", "")}
    for field, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{field} of a peer is {value!r}; it must be a string")
    if not isinstance(raw["ratio"], float) or raw["ratio"] <= 1.0:
        raise TypeError(f"ratio of a peer is {raw['ratio']!r}; it must be a number above 1, as the peer is the faster one")
    config = Config.parse(texts["config"])
    return FasterPeer(texts["kernel"], config, raw["ratio"], parse_problem(texts["problem"]), texts["backend"] or None)
