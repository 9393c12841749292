"""Several processes share one GPU in time slices: calls end, and repeat their bits."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.unit.shared_gpu import WHATS

PROCESSES, SECONDS, LIMIT_S = 6, 30, 180


@pytest.mark.gpu
@pytest.mark.parametrize("what", WHATS)
def test_processes_that_share_a_gpu_repeat_their_bits(what: str) -> None:
    """Two fp8 kernels did not until each word of shared memory had one use (docs/notes/shared-gpu.md)."""
    command = (sys.executable, "-m", "tests.unit.shared_gpu", what, str(SECONDS))
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    try:
        said = [process.communicate(timeout=LIMIT_S)[0].strip() for process in running]
    finally:
        for process in running:
            process.kill()
    assert said == ["0 results differed"] * PROCESSES
