"""Processes that a child's code started, found and ended wherever they went."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from flashmoe_science.measure.sandbox.processes import (
    MARK_VARIABLE,
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
