"""All processes that a child started, found by a mark in the environment that they inherit; and their processor time.

A process may leave its session and outlive its parent, but the environment that it was started with stays in ``/proc``. A
process that clears its environment on purpose is not found; on other systems than Linux none is.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashmoe_science.measure.channel import Child

MARK_VARIABLE = "FLASHMOE_CHILD"
_PROC = Path("/proc")
_SWEEPS, _SWEEP_S = 5, 0.02  # a process may fork during the scan, and one that is killed takes a moment to end
_SLACK_S = 0.05  # the system counts in hundredths of a second
_MAX_OF_OTHERS = 0.03  # processors, of threads other than the timed one: only the function's work is there
_MAX_OF_STARTED = 0.1  # processors, of processes that it started: a compiler's helpers wait


def marked(mark: str) -> Iterator[int]:
    """The processes that have the mark, the child itself among them."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def end_marked(mark: str) -> None:
    """Kill all processes with the mark."""
    for _ in range(_SWEEPS):
        found = list(marked(mark))
        for one in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        if not found:
            return
        time.sleep(_SWEEP_S)


def _seconds(stat: str, counts: int) -> float:
    """Processor time in a file below /proc: user, system and, of 4 ``counts``, of children that ended; 0 if it cannot be
    read."""
    try:
        fields = (_PROC / stat).read_text(errors="replace").rpartition(")")[2].split()  # the name before may hold anything
        return sum(map(int, fields[11 : 11 + counts])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


class Usage:
    """Processor time used since the object was made. On a CPU a function and its rivals are timed on one thread
    (``one_thread``): work on other threads or processes is time that no clock shows, or that the rivals lose."""

    def __init__(self, child: Child, one_thread: bool) -> None:
        self._child, self._one_thread = child, one_thread
        self._began, self._request_ns = time.monotonic(), child.request_ns
        self._others, self._started = self._of_other_threads(), self._of_started()

    def too_much(self) -> str | None:
        """Why the processor time used since is too much; None where it is not."""
        others, asked = self._of_other_threads() - self._others, (self._child.request_ns - self._request_ns) / 1e9
        if self._one_thread and others > _MAX_OF_OTHERS * asked + _SLACK_S:
            return f"it works on other threads than the one that is timed: {others:.2f} s of CPU time there in {asked:.2f} s"
        started, passed = self._of_started() - self._started, time.monotonic() - self._began
        if started > _MAX_OF_STARTED * passed + _SLACK_S:
            return f"processes that it started work while it is timed: {started:.2f} s of CPU time in {passed:.2f} s"
        return None

    def _of_other_threads(self) -> float:
        """Processor seconds of the child's threads other than its first, ended ones included."""
        pid = self._child.pid
        return max(0.0, _seconds(f"{pid}/stat", 2) - _seconds(f"{pid}/task/{pid}/stat", 2))

    def _of_started(self) -> float:
        return sum(_seconds(f"{one}/stat", 4) for one in marked(self._child.mark) if one != self._child.pid)
