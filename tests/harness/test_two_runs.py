"""Two runs at once do not mix: neither writes into the other's file, and a run that is alive is not gone on with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flashmoe_science.measure.suites import suite

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
def test_two_runs_into_one_folder(tmp_path: Path) -> None:
    path = tmp_path / "proof" / "run-cpu.jsonl"
    with start(tmp_path, "cpu", *ASKED, "--out", "proof") as first:
        while first.poll() is None and not (path.exists() and path.stat().st_size):
            time.sleep(0.02)
        first.send_signal(19)  # SIGSTOP: alive, however slow this machine is
        try:
            for arguments, said in (
                (["cpu", *ASKED, "--out", "proof"], "run-cpu.jsonl exists already; a run is never overwritten"),
                (["--resume", "proof"], "run-cpu.jsonl is being written by another process; wait until that run ends"),
            ):
                with start(tmp_path, *arguments) as second:
                    _, complaint = second.communicate(timeout=300)
                assert second.returncode == 2
                assert said in complaint
        finally:
            first.send_signal(18)  # SIGCONT
        first.communicate(timeout=300)
    assert first.returncode in (0, 3)
    run = read_run(path)
    assert run.complete
    assert len(run.done) == len(suite("cpu"))


@pytest.mark.slow
def test_two_runs_side_by_side_have_folders_of_their_own(tmp_path: Path) -> None:
    with start(tmp_path, TINY, *ASKED) as one, start(tmp_path, TINY, *ASKED) as other:
        for process in (one, other):
            _, complaint = process.communicate(timeout=300)
            assert process.returncode in (0, 3), complaint
    runs = [read_run(path) for path in (tmp_path / "reports").glob("*/run-custom.jsonl")]
    assert len({run.header.run for run in runs}) == 2
    assert all(run.complete for run in runs)
