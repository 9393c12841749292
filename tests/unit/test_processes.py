"""A pool's process does not outlive a parent that was killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

PARENT = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from flashmoe_science.processes import end_with_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # it has ended, and nobody has waited for it


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc to look at another process")
def test_it_ends_soon_after_its_parent_was_killed(tmp_path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    until = time.monotonic() + 20
    while alive(child) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive(child)
