"""Digests of machine code: a build's PTX without what only a debugger reads, compared with the committed digest.

Each Triton generates other code: the oldest and the newest supported have a file each, and no other is compared. There a build
is named by kernel, device function, GPU, problem and config, never by a module or a line: what moves or is renamed within a
kernel changes no digest. `tests/compile` compares.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import triton

FOLDER = Path(__file__).parents[1] / "tests/compile/digests"
VERSION = ".".join(triton.__version__.split(".")[:2])

_DEBUG = re.compile(
    r"^\s*\.section\s+\.debug_\w+\s*\{[^}]*\}"  # DWARF
    r"|^\s*\.(?:loc|file)\s.*$"
    r"|^\.global .*\bassertFile_\d+\[.*$|^\s*st\.param\.b32\s+\[param2\], \d+;$"  # where an assertion stands
    r"|^\$L__(?:tmp|func_begin|func_end)\d+:"  # labels that only DWARF refers to
    r"|//.*$",
    re.MULTILINE,
)


class Changed(Exception):
    """Machine code is not what is committed. No AssertionError: a test that may fail for its spills fails for this."""


class Name(NamedTuple):
    kernel: str
    function: str
    gpu: str
    problem: str
    config: str


def digest(ptx: str) -> str:
    """16 hexadecimal digits that change with the instructions, their order, registers and arguments, and with nothing else."""
    lines = (" ".join(line.split()) for line in _DEBUG.sub("", ptx).splitlines())
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:16]


def hold(name: Name, found: str) -> None:
    """Return where ``found`` is the digest committed for ``name``, or none is of this Triton.

    Raises:
        Changed: it is another, or none is committed.
    """
    committed = read().get(name)
    if committed == found or not _path().exists():
        return
    reason = f"its digest was {committed} and is {found}" if committed else "no digest is committed for it"
    raise Changed(
        f"machine code of {' / '.join(name)}, Triton {VERSION}: {reason}. To commit what is built, with the reason and a "
        f"measurement: make digests ARGS=--write-digests (what `make ci` builds: ARGS='--write-digests -m \"not redundant\"')"
    )


def read() -> dict[Name, str]:
    """The digests that are committed for this Triton."""
    tree = json.loads(_path().read_text()) if _path().exists() else {}
    found: dict[Name, str] = {}
    for build, configs in tree.items():
        kernel, function, gpu, problem = build.split(" ", 3)
        found |= {Name(kernel, function, gpu, problem, config): text for config, text in configs.items()}
    return found


def write(found: Mapping[Name, str], *, whole: bool) -> None:
    """Write digests of this Triton to its file, in which the others stay unless ``found`` is the ``whole`` of them."""
    tree: dict[str, dict[str, str]] = defaultdict(dict)
    for name, text in {**({} if whole else read()), **found}.items():
        tree[" ".join(name[:-1])][name.config] = text
    _path().write_text(json.dumps(tree, indent=1, sort_keys=True) + "\n")


def _path() -> Path:
    return FOLDER / f"triton-{VERSION}.json"
