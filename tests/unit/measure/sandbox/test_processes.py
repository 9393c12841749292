"""Processes that a child's code started, found and ended wherever they went."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe_science.measure.sandbox import processes
from flashmoe_science.measure.sandbox.processes import (
    MARK_VARIABLE,
    Usage,
    end_marked,
    marked,
    processor_seconds,
    seconds_of_other_threads,
)

# Forks twice, in a session of its own, so that nobody is its parent; then waits to be found.
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def test_a_process_that_went_its_own_way_is_found_and_ended() -> None:
    mark, other = "0123456789abcdef", "fedcba9876543210"
    subprocess.run([sys.executable, "-c", DAEMON], env={**os.environ, MARK_VARIABLE: mark}, check=True, timeout=60)
    (daemon,) = marked(mark)
    assert os.getsid(daemon) != os.getsid(0)
    end_marked(other)
    assert list(marked(mark)) == [daemon]
    end_marked(mark)
    assert list(marked(mark)) == []


def _work(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_the_system_counts_what_a_process_uses_and_on_which_threads() -> None:
    one = os.getpid()
    before, others = processor_seconds(one), seconds_of_other_threads(one)
    worker = threading.Thread(target=_work, args=(0.2,))
    worker.start()
    worker.join()
    assert processor_seconds(one) >= before + 0.1
    assert seconds_of_other_threads(one) >= others + 0.1
    assert processor_seconds(2**30) == 0.0  # there is none


OWN, STARTED = 7, 8


@pytest.mark.parametrize(
    ("others", "of_started", "one_thread", "words"),
    [
        (0.0, 0.0, True, None),
        (
            0.9,
            0.0,
            True,
            "other threads than the one that it and its rivals are timed on: 0.90 s of processors there in 2.00 s",
        ),
        (0.9, 0.0, False, None),
        (0.1, 0.4, True, None),
        (0.0, 2.0, False, "processes that it started work while it is timed: 2.00 s of processors in 4.00 s"),
    ],
)
def test_more_than_its_share_is_named(
    others: float, of_started: float, one_thread: bool, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for 2 of 4 seconds."""
    used, others_used = {OWN: 10.0, STARTED: 5.0}, [1.0]
    times = iter([100.0, 104.0])
    monkeypatch.setattr(processes, "marked", lambda mark: iter([OWN, STARTED]))
    monkeypatch.setattr(processes, "processor_seconds", used.__getitem__)
    monkeypatch.setattr(processes, "seconds_of_other_threads", lambda pid: others_used[0])
    monkeypatch.setattr(processes.time, "monotonic", lambda: next(times))
    child: Any = SimpleNamespace(pid=OWN, mark="m", asked_ns=10**9)
    counted = Usage(child, one_thread)
    others_used[0] += others
    used[STARTED] += of_started
    child.asked_ns += 2 * 10**9
    found = counted.too_much()
    assert found is None if words is None else words in str(found)
