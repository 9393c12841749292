"""Two runs at once do not mix: neither writes into the other's file, and a run that is alive is not gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashmoe_science.store import read_run

COMMAND = [sys.executable, "-m", "flashmoe_science", "prove"]
ASKED = ["--kernel", "sdpa", "--against", "sdpa_math", "--quick"]
TINY = "attn b1 h2 q16 d16 fp32"
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, env=NO_GPU, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_run_that_is_alive_is_not_gone_on_with_and_its_file_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "proof" / "run-custom.jsonl"
    with start(tmp_path, TINY, *ASKED, "--out", "proof") as first:
        while first.poll() is None and not (path.exists() and path.stat().st_size):
            time.sleep(0.02)
        first.send_signal(signal.SIGSTOP)  # alive, however slow this machine is
        try:
            with start(tmp_path, "--resume", "proof") as second:
                _, complaint = second.communicate(timeout=300)
            assert second.returncode == 2
            assert "run-custom.jsonl is being written by another process; wait until that run ends" in complaint
            with start(tmp_path, TINY, *ASKED, "--out", "proof") as second:
                second.communicate(timeout=300)
        finally:
            first.send_signal(signal.SIGCONT)
        first.communicate(timeout=300)
    assert first.returncode in (0, 3)
    for one in (path, path.with_name("run-custom-2.jsonl")):
        run = read_run(one)
        assert run.complete
        assert run.done_by(None) == {TINY}
