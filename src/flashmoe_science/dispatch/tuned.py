"""Entries that ``flashmoe tune`` made on this machine, in addition to the committed table.

``tuned/GPU.json`` in the user's cache folder has the form of dispatch/table.json and the card's name: ``{"schema": 1, "gpu":
"rtx-4000", "entries": [...]}``. The file is not trusted: each field is checked, and a file with a wrong one is ignored, with a
warning that names the field. Its kernels and configs serve only if the package offers them. FLASHMOE_TUNED=0 reads no file.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from flashmoe_science.dispatch.table import SCHEMA, Entry, FasterPeer, Table, committed_table
from flashmoe_science.kernel import Config
from flashmoe_science.operations import is_operation, parse_problem
from flashmoe_science.problem import Problem
from flashmoe_science.user_cache import user_cache

ALLOWED = "FLASHMOE_TUNED"
_MAX_BYTES, _MAX_TEXT, _MAX_NS = 16 << 20, 500, 10**15
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
_NEEDED, _OPTIONAL = ("gpu", "problem", "kernel", "config", "run", "time_ns"), ("rival", "ratio", "peers")
_OF_PEER, _OPTIONAL_OF_PEER = ("kernel", "config", "ratio", "problem"), ("backend",)


class TunedError(ValueError):
    """A file of tuned entries cannot be used: what is wrong with it, in one line."""


def folder() -> Path:
    """The folder of the tuned tables. Raises RuntimeError: there is no home folder."""
    return user_cache() / "tuned"


@functools.cache
def known_table() -> Table:
    """The committed table, preceded by the entries tuned on this machine, which replace others of the same GPU and problem.
    Read once a process. Raises TableError as ``committed_table``."""
    committed, own = committed_table(), _own_entries()
    if not own:
        return committed
    replaced = {(one.gpu, one.problem) for one in own}
    return Table((*own, *(one for one in committed.entries if (one.gpu, one.problem) not in replaced)))


def _own_entries() -> list[Entry]:
    found: list[Entry] = []
    if os.environ.get(ALLOWED) == "0":
        return found
    try:
        paths = sorted(folder().glob("*.json"))
    except (OSError, RuntimeError):
        return found
    for path in paths:
        try:
            found += read_tuned(path)
        except TunedError as error:
            warnings.warn(f"what was tuned on this machine is ignored: {error}; `flashmoe tune` makes it anew", stacklevel=2)
    return found


def read_tuned(path: Path) -> tuple[Entry, ...]:
    """The entries of a file. Raises TunedError: it cannot be read; a field is missing, unknown or wrong; it is for another card
    than its name says."""
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise ValueError(f"it has {size} bytes; it may have {_MAX_BYTES}")
        if not path.is_file():  # a pipe or a device might never end
            raise ValueError("it is no regular file")
        content = _object(json.loads(path.read_text(encoding="utf-8")), "the file", ("schema", "gpu", "entries"), ())
        if type(content["schema"]) is not int or content["schema"] != SCHEMA:
            raise ValueError(f"schema is {_shown(content['schema'])}; it must be {SCHEMA}")
        if content["gpu"] != path.stem:
            raise ValueError(f"gpu is {_shown(content['gpu'])}; in a file of that name it must be {path.stem!r}")
        if not isinstance(content["entries"], list):
            raise ValueError(f"entries is {_shown(content['entries'])}; it must be a list")
        return _entries(content["entries"], path.stem)
    except OSError as error:
        raise TunedError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except RecursionError as error:
        raise TunedError(f"{path}: it is nested too deeply") from error
    except ValueError as error:  # not UTF-8, not JSON, or a field
        raise TunedError(f"{path}: {' '.join(str(error).split())}") from error


def _entries(raws: list[Any], gpu: str) -> tuple[Entry, ...]:
    found: dict[Problem, Entry] = {}
    for number, raw in enumerate(raws, 1):
        try:
            entry = _entry(raw, gpu)
        except ValueError as error:
            raise ValueError(f"entry {number}: {error}") from error
        if entry.problem in found:
            raise ValueError(f"entry {number}: problem '{entry.problem}' is given twice")
        found[entry.problem] = entry
    return tuple(found.values())


def _entry(raw: object, gpu: str) -> Entry:
    one = _object(raw, "it", _NEEDED, _OPTIONAL)
    if one["gpu"] != gpu:
        raise ValueError(f"gpu is {_shown(one['gpu'])}; it must be the file's, {gpu!r}")
    if type(one["time_ns"]) is not int or not 0 < one["time_ns"] < _MAX_NS:
        raise ValueError(f"time_ns is {_shown(one['time_ns'])}; it must be an integer from 1 to {_MAX_NS - 1}")
    rival = None if one.get("rival") is None else _name(one, "rival")
    ratio = None if one.get("ratio") is None else _ratio(one)
    peers = one.get("peers", [])
    if not isinstance(peers, list):
        raise ValueError(f"peers is {_shown(peers)}; it must be a list")
    problem = _problem(one).without_layout()
    kernel, config, run, peers = _name(one, "kernel"), _config(one), _name(one, "run"), tuple(map(_peer, peers))
    return Entry(gpu, problem, kernel, config, run, one["time_ns"], peers, True, rival, ratio)


def _peer(raw: object) -> FasterPeer:
    one = _object(raw, "a peer", _OF_PEER, _OPTIONAL_OF_PEER)
    backend = None if one.get("backend") is None else _text(one, "backend")
    return FasterPeer(_name(one, "kernel"), _config(one), _ratio(one), _problem(one), backend)


def _object(raw: object, what: str, needed: Collection[str], optional: Collection[str]) -> dict[str, Any]:
    """A JSON object with these fields and no others."""
    if not isinstance(raw, dict):
        raise ValueError(f"{what} is {_shown(raw)}; it must be an object")
    if missing := [name for name in needed if name not in raw]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    if unknown := [name for name in raw if name not in (*needed, *optional)]:
        raise ValueError(f"{what} has the field {_shown(unknown[0])}; it may have {', '.join((*needed, *optional))}")
    return raw


def _text(one: dict[str, Any], name: str) -> str:
    value = one[name]
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
        raise ValueError(f"{name} is {_shown(value)}; it must be a text of at most {_MAX_TEXT} printable characters")
    return value


def _name(one: dict[str, Any], name: str) -> str:
    value = _text(one, name)
    if _NAME.fullmatch(value) is None:
        raise ValueError(f"{name} is {_shown(value)}; it must be a name")
    return value


def _config(one: dict[str, Any]) -> Config:
    return Config.parse(_text(one, "config"))


def _problem(one: dict[str, Any]) -> Problem:
    problem = parse_problem(_text(one, "problem"))
    if not is_operation(problem.op):
        raise ValueError(f"problem is '{problem}'; it must be of an operation of this package")
    return problem


def _ratio(one: dict[str, Any]) -> float:
    value = one["ratio"]
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"ratio is {_shown(value)}; it must be a number above 0")
    return float(value)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
