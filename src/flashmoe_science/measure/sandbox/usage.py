"""Processor time that a function takes on other threads and processes while it is timed, as the system counts it."""

from __future__ import annotations

import time

from flashmoe_science.measure.channel import Child
from flashmoe_science.measure.sandbox.processes import marked, processor_seconds, seconds_of_other_threads

_SLACK_S = 0.05  # the system counts in hundredths of a second
_MOST_OF_OTHERS = 0.03  # processors, of threads beside the one that is timed: nothing but its work is there
_MOST_OF_STARTED = 0.1  # processors, of processes that it started: a compiler's helpers wait


class Usage:
    """Counts from when it is made. On a CPU a function and its rivals are timed on one thread (``one_thread``): work on other
    threads or processes is time that no clock shows, or that is taken from the rivals."""

    def __init__(self, child: Child, one_thread: bool) -> None:
        self._child, self._one_thread = child, one_thread
        self._began, self._asked_ns = time.monotonic(), child.asked_ns
        self._others, self._started = seconds_of_other_threads(child.pid), self._of_started()

    def too_much(self) -> str | None:
        """Why what was used since is too much; None where it is not."""
        others, asked = seconds_of_other_threads(self._child.pid) - self._others, (self._child.asked_ns - self._asked_ns) / 1e9
        if self._one_thread and others > _MOST_OF_OTHERS * asked + _SLACK_S:
            return (
                f"it works on other threads than the one that it and its rivals are timed on: "
                f"{others:.2f} s of processors there in {asked:.2f} s"
            )
        started_s, passed = self._of_started() - self._started, time.monotonic() - self._began
        if started_s > _MOST_OF_STARTED * passed + _SLACK_S:
            return f"processes that it started work while it is timed: {started_s:.2f} s of processors in {passed:.2f} s"
        return None

    def _of_started(self) -> float:
        return sum(processor_seconds(one) for one in marked(self._child.mark) if one != self._child.pid)
