"""How much of the machine's processors a candidate takes while it is timed, as the system counts it, and not the candidate."""

from __future__ import annotations

import time

from flashmoe_science.measure.trial.kin import kin, processor_seconds, seconds_of_other_threads
from flashmoe_science.measure.trial.warden import Ward

_SLACK_S = 0.05  # the system counts in hundredths of a second
_MOST_OF_OTHERS = 0.03  # processors, of threads beside the one that is timed: nothing but its work is there
_MOST_OF_KIN = 0.1  # processors, of processes that it started: a compiler's helpers wait


class Usage:
    """Counts from when it is made. A candidate and its rivals have one thread each on a CPU (``one_thread``); work on others,
    or in other processes, is time that no clock shows, or that it takes from its rivals."""

    def __init__(self, ward: Ward, one_thread: bool) -> None:
        self._ward, self._one_thread = ward, one_thread
        self._began, self._asked_ns = time.monotonic(), ward.asked_ns
        self._others, self._kin = seconds_of_other_threads(ward.pid), self._of_kin()

    def too_much(self) -> str | None:
        """Why what was used since is too much; None where it is not."""
        others, asked = seconds_of_other_threads(self._ward.pid) - self._others, (self._ward.asked_ns - self._asked_ns) / 1e9
        if self._one_thread and others > _MOST_OF_OTHERS * asked + _SLACK_S:
            return (
                f"it works on other threads than the one that it and its rivals are timed on: "
                f"{others:.2f} s of processors there in {asked:.2f} s"
            )
        kin_s, passed = self._of_kin() - self._kin, time.monotonic() - self._began
        if kin_s > _MOST_OF_KIN * passed + _SLACK_S:
            return f"processes that it started work while it is timed: {kin_s:.2f} s of processors in {passed:.2f} s"
        return None

    def _of_kin(self) -> float:
        return sum(processor_seconds(one) for one in kin(self._ward.mark) if one != self._ward.pid)
