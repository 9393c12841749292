"""All processes that a child started, found by a mark in the environment that they inherit.

A process may leave its session and outlive its parent; what it was started with stays in ``/proc``. One that clears its
environment on purpose is not found. Elsewhere than on Linux none is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

MARK_VARIABLE = "FLASHMOE_CHILD"
_PROC = Path("/proc")
_SWEEPS = 5  # a process may fork during the scan


def new_mark() -> str:
    return secrets.token_hex(8)


def marked(mark: str) -> Iterator[int]:
    """The processes that have the mark, the child itself among them."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    for folder in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def end_marked(mark: str) -> None:
    """Kill all that has the mark."""
    for _ in range(_SWEEPS):
        found = list(marked(mark))
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        if not found:
            return


def processor_seconds(pid: int) -> float:
    """What a process and those of its children that have ended have used of processors; 0 where it is not known."""
    return _seconds(_PROC / str(pid) / "stat", 4)


def seconds_of_other_threads(pid: int) -> float:
    """What the threads of a process used, those that have ended among them, but for its first."""
    return max(0.0, _seconds(_PROC / str(pid) / "stat", 2) - _seconds(_PROC / str(pid) / "task" / str(pid) / "stat", 2))


def _seconds(path: Path, counts: int) -> float:
    """The sum of user and system time, and of as many ``counts`` from there on."""
    try:
        # The name, in parentheses, may hold anything.
        fields = path.read_text(errors="replace").rpartition(")")[2].split()
        return sum(map(int, fields[11 : 11 + counts])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
