"""Processes that a child's code started, found and ended wherever they went."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flashmoe_science.measure.sandbox.processes import MARK_VARIABLE, end_marked, marked

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
