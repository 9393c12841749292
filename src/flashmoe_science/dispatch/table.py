"""dispatch/table.json: which of our kernels was measured fastest, by problem and GPU. Generated from records, reviewed; a test
checks that every entry can be served.

``{"schema": 1, "entries": [{"gpu": "h200", "problem": "attn ...", "kernel": "...", "config": "block_m=64", "rival": "fa3",
"ratio": 1.021, "run": "...", "time_ns": 2420}]}``. A problem is written without its layout word, which decides strides, not the
kernel. An entry has ``peers`` if some were faster than the kernel in its run by more than 3%: ``[{"kernel": "sdpa", "config":
"", "ratio": 1.267, "problem": "attn ... bshd", "backend": "PyTorch's cuDNN backend"}]``, in the memory order that was measured.
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
    """The table cannot be read: what is wrong with it, in one line."""


@dataclass(frozen=True, slots=True)
class FasterPeer:
    """A peer that was faster than our winner in its run: ``ratio`` is our time over the peer's. ``backend`` is PyTorch's
    choice, if it chose one."""

    kernel: str
    config: Config
    ratio: float
    problem: Problem
    backend: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One measured winner. ``run`` names its record; ``time_ns`` is its median on the graph clock. ``peers`` were faster, the
    fastest first. ``tuned``: on this machine, not in the committed table. ``rival`` is the best peer that it was measured
    against, and ``ratio`` the peer's time over the winner's."""

    gpu: str
    problem: Problem
    kernel: str
    config: Config
    run: str
    time_ns: int
    peers: tuple[FasterPeer, ...] = ()
    tuned: bool = False
    rival: str | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Entries, at most one for a GPU and a problem."""

    entries: tuple[Entry, ...]

    def exact(self, gpu: str, problem: Problem) -> Entry | None:
        wanted = problem.without_layout()
        return next((entry for entry in self.entries if entry.gpu == gpu and entry.problem == wanted), None)


@functools.cache
def committed_table() -> Table:
    """The table that the package ships, parsed once. Raises TableError: it is missing or malformed."""
    try:
        text = PATH.read_text(encoding="utf-8")
    except OSError as error:
        raise TableError(f"dispatch table {PATH} cannot be read: {error.strerror}") from error
    return parse_table(text, str(PATH))


def parse_table(text: str, source: str) -> Table:
    """The table in a JSON text; ``source`` names it in messages. Raises TableError: not JSON, another schema, a field that is
    missing or does not parse, two entries for one GPU and problem."""
    try:
        content = json.loads(text)
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema is {content['schema']!r}; this version reads schema {SCHEMA}")
        entries = tuple(map(_entry, content["entries"]))
    except (KeyError, TypeError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else error
        raise TableError(f"dispatch table {source}: {what}") from error
    keys = [(one.gpu, one.problem) for one in entries]
    if len(set(keys)) < len(keys):
        gpu, problem = max(keys, key=keys.count)
        raise TableError(f"dispatch table {source}: {problem} on {gpu} is given twice")
    return Table(entries)


def _entry(raw: dict[str, Any]) -> Entry:
    return Entry(
        gpu=gpu_named(raw["gpu"]).name,
        problem=parse_problem(raw["problem"]).without_layout(),
        kernel=raw["kernel"],
        config=Config.parse(raw["config"]),
        run=raw["run"],
        time_ns=raw["time_ns"],
        peers=tuple(map(_peer, raw.get("peers", []))),
        rival=raw.get("rival"),
        ratio=raw.get("ratio"),
    )


def _peer(raw: dict[str, Any]) -> FasterPeer:
    config, problem = Config.parse(raw["config"]), parse_problem(raw["problem"])
    return FasterPeer(raw["kernel"], config, raw["ratio"], problem, raw.get("backend"))
